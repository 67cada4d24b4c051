"""Number of engines that Serve's autoscaler is to run."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lite.ray.config import KV_CACHE_USAGE, LoadPolicy


@pytest.mark.parametrize(
    ("requests", "usage", "engines"),
    [
        (0, {}, 0.0),
        (12, {"a": 0.1}, 3.0),
        (2, {"a": 0.9, "b": 0.3}, 2.4),
        (12, {"a": 0.9, "b": 0.3}, 3.0),
    ],
)
def test_requests_or_kv_caches_whichever_need_more(requests: int, usage: dict[str, float], engines: float) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 4.0)
    for metrics in [{KV_CACHE_USAGE: usage}, *([] if usage else [{}, None])]:
        context: Any = SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)
        wanted, state = LoadPolicy(0.5)(context)
        assert wanted == pytest.approx(engines)
        assert state == {}
