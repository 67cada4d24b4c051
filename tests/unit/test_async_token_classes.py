"""AsyncClient.token_classify with a fake engine: the windows of long texts are sent together, and end together."""

import asyncio
import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import SIZE, expect, ids
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.async_client import AsyncClient
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Abort, Finished, Generate
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.pooling import PoolerInfo

LABELS = "O", "B-PER", "I-PER"
LABEL_OF = {ids("o")[0]: 1, ids("n")[0]: 2, ids("e")[0]: 2}
TEXTS = ["one ox", "no one of six oxen"]
PERSON = re.compile("o[ne]*|[ne]+")


@pytest.fixture
def engine(folder: Path) -> Iterator[FakeEngine]:
    pooler = PoolerInfo(("token_classify",), labels=LABELS)
    made = welcome(vocab_size=SIZE, tokenizer=str(folder), max_model_len=8, pooler=pooler)
    with FakeEngine(answer=made) as engine:
        yield engine


def answer(asked: Generate) -> Finished:
    """Each token's label depends on itself alone."""
    numbers = array("f")
    for token in unpack_tokens(asked.prompt):
        row = [0.0] * len(LABELS)
        row[LABEL_OF.get(token, 0)] = 9.0
        numbers.extend(row)
    return Finished(asked.request_id, 0, [], "stop", pooled=numbers.tobytes())


async def test_all_windows_are_sent_before_one_is_answered(engine: FakeEngine) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncClient(engine.address) as client:
        task = asyncio.ensure_future(client.token_classify(TEXTS))
        asked = [await expect(engine, Generate) for _ in range(4)]
        assert [len(unpack_tokens(each.prompt)) for each in asked] == [6, 8, 8, 6]
        engine.send_outputs(*map(answer, reversed(asked)))
        for text, found in zip(TEXTS, await task, strict=True):
            spans = [(each.start, each.end, each.label, each.text) for each in found.outputs.entities]
            assert spans == [(*each.span(), "PER", each[0]) for each in PERSON.finditer(text)]
        rows = asyncio.ensure_future(anext(client.encode(TEXTS[1])))
        engine.send_outputs(*[answer(await expect(engine, Generate)) for _ in range(3)])
        assert len((await rows).outputs.data) == len(TEXTS[1])
        engine.expect_nothing_more()


async def test_an_error_of_one_window_fails_the_call(engine: FakeEngine) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncClient(engine.address) as client:
        task = asyncio.ensure_future(client.token_classify(TEXTS))
        first, *others = [await expect(engine, Generate) for _ in range(4)]
        broken = Finished(others[0].request_id, 0, [], "error", error="the worker died")
        engine.send_outputs(answer(first), broken, *map(answer, others[1:]))
        with pytest.raises(RequestError, match="prompt 1: the worker died"):
            await task
        with pytest.raises(RequestError, match="takes a text or a list of texts"):
            await client.token_classify([[1, 2]])  # type: ignore[list-item]


async def test_cancelling_the_task_aborts_every_window(engine: FakeEngine) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncClient(engine.address) as client:
        task = asyncio.ensure_future(client.token_classify(TEXTS[1]))
        asked = {(await expect(engine, Generate)).request_id for _ in range(3)}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {(await expect(engine, Abort)).request_id for _ in range(3)} == asked
