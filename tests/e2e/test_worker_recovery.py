"""Workers die in every possible way under a mixed load: every stream continues, with the same tokens as without deaths.
In float32."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import patience
from tests.e2e.failing_worker import VARIABLE
from tests.e2e.launched import launched
from tests.e2e.test_processes import START_S, family, seconds_until
from vllm_lite import AsyncClient, RequestOutput, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.errors import EngineDeadError
from vllm_lite.protocol.stats import Stats
from vllm_lite.worker import process

SILENCE_S = 1.5
"""Seconds on an idle machine. They are scaled for a busy one when an engine starts, not when this file is imported."""
NUM_TOKENS = 120
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)
LOAD = (
    [([5 + index, 6, 7], GREEDY) for index in range(6)]
    + [([9, 8, 7 + index] * 9, SEEDED) for index in range(3)]
    + [
        ([30, 31, 32], SamplingParams(n=3, temperature=1.0, seed=12, max_tokens=NUM_TOKENS, ignore_eos=True)),
        ([40, 41, 42], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)),
        ([50] * 40, SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1, presence_penalty=0.5)),
        ([60, 61, 62], SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=40, ignore_eos=True)),
    ]
)
FAILURES = [(2, "1 step raise", "failed"), (1, "0 step spin", "stuck"), (1, "0 step hang", "failed")]
Launch = Callable[..., LaunchedEngine]
Tokens = list[list[int]]


@pytest.fixture
def launch(tiny_checkpoint: Path) -> Iterator[Launch]:
    """Starts an engine whose first workers fail as tests/e2e/failing_worker.py describes."""
    with ExitStack() as stack:

        def start(world: int, failure: str | None = None, **settings: Any) -> LaunchedEngine:
            environment = {} if failure is None else {VARIABLE: failure}
            usual: dict[str, Any] = {"model": tiny_checkpoint, "worker_module": "tests.e2e.failing_worker"}
            usual |= {"tensor_parallel_size": world, "heartbeat_timeout_s": patience(SILENCE_S)}
            return stack.enter_context(launched(environment=environment, **(usual | settings)))

        yield start


def tokens_of(output: RequestOutput) -> Tokens:
    return [list(one.token_ids) for one in output.outputs]


async def follow(outputs: AsyncIterator[RequestOutput], started: asyncio.Semaphore) -> Tokens:
    last = None
    async for output in outputs:
        if last is None:
            started.release()
        last = output
    assert last is not None
    return tokens_of(last)


async def serve(client: AsyncClient, fail: Callable[[], None] = lambda: None) -> list[Tokens]:
    """Return the tokens of every request. `fail` is called once all that stream have a token."""
    started = asyncio.Semaphore(0)
    streams = [asyncio.ensure_future(follow(client.generate(prompt, params), started)) for prompt, params in LOAD]
    for _ in LOAD[:-1]:  # beams come at their end only
        await asyncio.wait_for(started.acquire(), START_S)
    fail()
    return await asyncio.wait_for(asyncio.gather(*streams), START_S)


async def fail_and_compare(engine: LaunchedEngine, fail: Callable[[], None] = lambda: None) -> Stats:
    """Serve the load while workers fail, and again while they do not."""

    async with AsyncClient(engine.address) as client:
        interrupted = await serve(client, fail)
        stats = await client.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert (stats.generation, stats.recovering) == (2, "")
        assert interrupted == await serve(client)
        assert (await client.stats()).generation == 2
        return stats


async def test_streams_continue_when_a_rank_is_stopped(launch: Launch) -> None:
    """Killed ranks are tested in test_kill_points.py."""
    engine, rank = launch(2), 0
    pid = family(engine.pid)[1 + rank]
    stats = await fail_and_compare(engine, lambda: os.kill(pid, signal.SIGSTOP))
    assert stats.restarts == {"silent": 1}
    assert stats.recovered_requests == len(LOAD)
    assert stats.lost_s > 0
    assert pid not in family(engine.pid)


@pytest.mark.parametrize(("world", "failure", "cause"), FAILURES)
async def test_streams_continue_when_a_rank_fails_in_a_step(
    launch: Launch, world: int, failure: str, cause: str
) -> None:
    stats = await fail_and_compare(launch(world, failure))
    assert stats.restarts == {cause: 1}


async def test_a_standby_worker_takes_over_and_another_one_is_started(launch: Launch) -> None:
    engine = launch(1, standby_workers=True)

    def comm(pid: int) -> str:
        return Path(f"/proc/{pid}/comm").read_text().strip()

    async def two_workers() -> list[int]:
        """Once they are there, and have their names."""
        await asyncio.to_thread(
            seconds_until, lambda: len(family(engine.pid)) == 3, START_S, "a standby worker is there"
        )
        _, worker, standby = family(engine.pid)
        await asyncio.to_thread(seconds_until, lambda: comm(standby).startswith("vl-"), START_S, "it has its name")
        return [worker, standby]

    async with AsyncClient(engine.address) as client:
        expected = await serve(client)
        worker, standby = await two_workers()
        assert (comm(worker), comm(standby)) == ("vl-worker 0", "vl-standby 0")
        assert await serve(client, lambda: os.kill(worker, signal.SIGKILL)) == expected
        assert (await two_workers())[0] == standby
        assert comm(standby) == "vl-worker 0"


async def test_a_model_that_has_gone_is_the_end_of_every_stream(
    tiny_checkpoint: Path, launch: Launch, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    engine = launch(1, model=model)
    pid = family(engine.pid)[1]

    def fail() -> None:
        for file in model.glob("*.safetensors"):
            file.unlink()
        os.kill(pid, signal.SIGKILL)

    async with AsyncClient(engine.address) as client:
        started = asyncio.Semaphore(0)
        stream = asyncio.ensure_future(follow(client.generate([5, 6, 7], GREEDY), started))
        await asyncio.wait_for(started.acquire(), START_S)
        fail()
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(stream, START_S)
    words = str(caught.value)
    assert words.startswith("the workers cannot be started again: "), words
    assert words.endswith(f"they were restarted because worker 0 (pid {pid}) died: killed by SIGKILL"), words
    assert engine.wait(START_S)


async def test_a_worker_that_is_a_thread_is_replaced(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, num_messages = process.execute, 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_messages
        num_messages += 1
        if num_messages == 10:
            raise ValueError("injected")
        return execute(*arguments)

    monkeypatch.setattr(process, "execute", failing)
    stats = await fail_and_compare(launch(1, worker_module="vllm_lite.worker.process", single_process=True))
    assert stats.restarts == {"failed": 1}
