"""A worker and an engine are killed in the middle of outputs that follow a grammar. The outputs continue with the same
tokens and still follow it. All in float32."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.test_engine_recovery import engine_of, workers_of
from tests.e2e.test_processes import START_S, Engine, run_root
from vllm_lite import AsyncClient, SamplingParams
from vllm_lite.protocol.structured import StructuredOutputsParams, Thinking

__all__ = ["run_root"]

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
NGRAM = ("--speculative-config", json.dumps(SPECULATION), "--disable-adaptive-drafts")
ITEM = {
    "type": "object",
    "properties": {"name": {"enum": ["a bear", "a bee"]}, "age": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 14, "maxItems": 14}
END = 7
THINKING = Thinking(end=(END, END), is_open=True, budget=40)
USUAL: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 700}
LOAD = (
    SamplingParams(temperature=1.0, seed=3, **USUAL),
    SamplingParams(temperature=0.0, **USUAL),
    SamplingParams(temperature=1.0, seed=4, n=3, **USUAL),
    SamplingParams(temperature=1.0, seed=5, thinking=THINKING, **USUAL),
    SamplingParams(temperature=0.0, thinking=THINKING, **USUAL),
)


async def read(client: AsyncClient, index: int, started: asyncio.Semaphore) -> list[list[int]]:
    last = None
    async for output in client.generate([5 + index, 6, 8], LOAD[index]):
        if last is None:
            started.release()
        last = output
    assert last is not None
    for sample in last.outputs:
        assert sample.finish_reason == "stop"
        if LOAD[index].thinking is None:
            jsonschema.validate(json.loads(sample.text), SCHEMA)
    return [list(sample.token_ids) for sample in last.outputs]


async def load(address: str, disturb: Callable[[], None] = lambda: None) -> list[list[list[int]]]:
    """Return the tokens of every request; `disturb` is called once all of them have a token."""
    async with AsyncClient(address) as client:
        started = asyncio.Semaphore(0)
        reading = [asyncio.ensure_future(read(client, index, started)) for index in range(len(LOAD))]
        for _ in reading:
            await asyncio.wait_for(started.acquire(), START_S)
        assert not all(each.done() for each in reading)
        disturb()
        return await asyncio.wait_for(asyncio.gather(*reading), START_S)


@pytest.mark.parametrize("flags", [(), NGRAM], ids=["jump-forward", "n-gram"])
async def test_outputs_with_a_form_continue_when_a_worker_or_an_engine_is_killed(
    run_root: Path, tiny_checkpoint: Path, flags: tuple[str, ...]
) -> None:
    engine = Engine(tiny_checkpoint, "--dtype", "float32", *flags)
    launcher = engine.process.pid

    def kill_worker() -> None:
        os.kill(workers_of(launcher)[0], signal.SIGKILL)

    def kill_engine() -> None:
        pid = engine_of(launcher)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    try:
        whole = await load(engine.address)
        for disturb in (kill_worker, kill_engine):
            assert await load(engine.address, disturb) == whole, disturb.__name__
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(START_S) == 0
    finally:
        engine.end()
