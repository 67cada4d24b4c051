"""The load in headers of answers: in both forms that vLLM has, and never instead of an answer."""

from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from tests.fakes import STATS
from vllm_lite.server.load_report import load_report
from vllm_lite.server.openai.errors import ApiError


class Calls:
    """An engine that says how it is, or nothing."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.error = error

    async def stats(self) -> Any:
        if self.error is not None:
            raise self.error
        return msgspec.structs.replace(STATS, num_blocks=8, num_used_blocks=2, num_waiting=3)


async def report(asked: str | None, error: ApiError | None = None) -> dict[str, str]:
    headers = [] if asked is None else [(b"endpoint-load-metrics-format", asked.encode())]
    request = Request({"type": "http", "headers": headers})
    return await load_report(request, Calls(error))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"),
        ("json", 'JSON {"named_metrics":{"kv_cache_usage_perc":0.25,"num_requests_waiting":3.0}}'),
    ],
)
async def test_both_forms(asked: str, told: str) -> None:
    assert await report(asked) == {"endpoint-load-metrics": told}


@pytest.mark.parametrize("asked", [None, "", "BIN", "TEXT, JSON"])
async def test_there_is_none_in_another_form_or_unasked(asked: str | None) -> None:
    assert await report(asked) == {}


async def test_an_engine_that_does_not_answer_has_none() -> None:
    assert await report("TEXT", ApiError(503, "it is being replaced")) == {}
