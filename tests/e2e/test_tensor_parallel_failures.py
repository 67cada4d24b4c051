"""One of two ranks fails in every way: clients get an error in time that names the rank, and nothing is left."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import patience, scaled
from tests.e2e.test_processes import START_S, TOLD_S, assert_nothing_left, consume, family, run_root
from vllm_lite import AsyncClient, EngineConfig
from vllm_lite.client.engines import launch as launching
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.errors import EngineDeadError, EngineError
from vllm_lite.process_settings import EngineSettings

__all__ = ["run_root"]

WORLD, NUM_STREAMS = 2, 12
SILENCE_S = 1.5
"""Seconds on an idle machine. They are scaled for a busy one when an engine starts, not when this file is imported."""

Launch = Callable[..., LaunchedEngine]


@pytest.fixture
def launch(run_root: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts an engine with the workers of tests/e2e/failing_worker.py, and checks at its end that nothing is left."""
    module = "tests.e2e.failing_worker"
    monkeypatch.setattr(launching, "EngineSettings", partial(EngineSettings, worker_module=module))
    launched: list[LaunchedEngine] = []
    pids: list[int] = []

    def start(failure: str | None = None) -> LaunchedEngine:
        if failure is not None:
            monkeypatch.setenv("FAILURE", failure)
        settings = {
            "model": str(tiny_checkpoint),
            "tensor_parallel_size": WORLD,
            "heartbeat_timeout_s": patience(SILENCE_S),
        }
        settings["max_restarts"] = 0
        launched.append(launching.launch(EngineConfig.check(settings | {"device": "cpu", "cpu_threads": 1})))
        pids.extend(family(launched[0].pid))
        assert len(pids) == 1 + WORLD
        return launched[0]

    yield start
    for engine in launched:
        if not engine.wait(hung_s(engine)):
            pytest.fail("the engine lives on")
        engine.close()
    assert_nothing_left(pids, run_root)


def hung_s(engine: LaunchedEngine) -> float:
    """A rank that hangs is found within the limit, and one heartbeat and one look at it later at most."""
    return engine.config.heartbeat_timeout_s + scaled(2.0)


def workers(engine: LaunchedEngine) -> list[int]:
    return family(engine.pid)[1:]


async def fail_under_load(address: str, fail: Callable[[], None]) -> tuple[float, list[Any]]:
    """Seconds from `fail` until the last stream has ended, and how each did."""
    async with AsyncClient(address) as client:
        started = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(consume(client, [5 + index, 6, 7], started)) for index in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            await asyncio.wait_for(started.acquire(), START_S)
        loop = asyncio.get_running_loop()
        fail()
        began_s = loop.time()
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), START_S)
        return loop.time() - began_s, results


def assert_all_know(results: list[Any], words: str) -> None:
    assert len(results) == NUM_STREAMS
    for result in results:
        assert isinstance(result, EngineDeadError), result
        assert words in str(result)


@pytest.mark.parametrize("rank", range(WORLD))
async def test_a_killed_rank_ends_every_stream(launch: Launch, rank: int) -> None:
    engine = launch()
    pid = workers(engine)[rank]
    told_s, results = await fail_under_load(engine.address, lambda: os.kill(pid, signal.SIGKILL))
    assert told_s < scaled(TOLD_S)
    assert_all_know(results, f"worker {rank} (pid {pid}) died: killed by SIGKILL")


async def test_a_stopped_rank_ends_every_stream(launch: Launch) -> None:
    engine, rank = launch(), 1
    pid = workers(engine)[rank]
    told_s, results = await fail_under_load(engine.address, lambda: os.kill(pid, signal.SIGSTOP))
    assert told_s < hung_s(engine)
    assert_all_know(results, f"worker {rank} (pid {pid}) has been silent for ")


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_that_ends_while_all_are_idle_is_found(launch: Launch, rank: int, number: signal.Signals) -> None:
    engine = launch()
    pid = workers(engine)[rank]
    os.kill(pid, number)
    assert engine.wait(hung_s(engine))
    assert f"worker {rank} (pid {pid})" in engine.reason


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (0, "raise", "failed: ValueError: injected"),
        (1, "raise", "failed: ValueError: injected"),
        (1, "exit", "died: exit status 0"),
        (0, "spin", "is stuck: no layer in "),
        (1, "hold", "has been silent for "),
    ],
)
async def test_a_rank_that_fails_in_a_step_is_named(launch: Launch, rank: int, how: str, words: str) -> None:
    engine = launch(f"{rank} step {how}")
    async with AsyncClient(engine.address) as client:
        streams = [consume(client, [5 + index, 6, 7]) for index in range(NUM_STREAMS)]
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), START_S)
    assert_all_know(results, words)
    assert_all_know(results, f"worker {rank} ")


@pytest.mark.parametrize(
    ("rank", "how", "words"), [(0, "exit", "died: exit status 0"), (1, "raise", "failed: ValueError: injected")]
)
def test_a_rank_that_fails_while_loading_ends_the_start(
    launch: Launch, run_root: Path, rank: int, how: str, words: str
) -> None:
    """The other one waits for it to come."""
    with pytest.raises(EngineError, match=f"^worker {rank} .*{words}$"):
        launch(f"{rank} start {how}")
    assert_nothing_left([], run_root)
