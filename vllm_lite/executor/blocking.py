"""Blocking calls of an executor, for callers with nothing else to do, such as an engine that starts."""

import time
from collections.abc import Callable
from typing import TypeVar

from vllm_lite import transport
from vllm_lite.errors import EngineError
from vllm_lite.executor.base import Executor, Failure, WorkersLostError
from vllm_lite.protocol.control import AdapterRead, Ready
from vllm_lite.transport import Wakeup

T = TypeVar("T")

LOOK_EVERY_S = 0.25
CAUSE_LOOK_S = 0.05


def load(executor: Executor, timeout_s: float, stop: Wakeup | None = None) -> Ready:
    """Start the workers, wait until they have loaded the model, and return their common Ready.

    `stop` ends the wait. Raises ModelError, ConfigError or EngineError, with the root cause.
    """
    executor.spawn()
    executor.begin_load(timeout_s)
    return _wait_for(executor.ready, executor, stop)


def allocate(
    executor: Executor, num_blocks: int, num_host_blocks: int, timeout_s: float, stop: Wakeup | None = None
) -> float:
    """Allocate the KV pools, and return the rate of block moves between them per second. Raises like load()."""
    executor.begin_allocate(num_blocks, num_host_blocks, timeout_s)
    return _wait_for(executor.started, executor, stop)


def read_adapter(
    executor: Executor, adapter: tuple[int, str, str], timeout_s: float, stop: Wakeup | None = None
) -> AdapterRead:
    """Let the workers read an adapter (number, name, path), and return the answer for all ranks. Raises like load(),
    and EngineError after `timeout_s`."""
    executor.read_adapter(*adapter)
    until_s = time.monotonic() + timeout_s

    def answer() -> list[AdapterRead] | None:
        if time.monotonic() > until_s:
            raise EngineError(f"adapter {adapter[1]!r} was not read after {timeout_s:.0f} s")
        return executor.adapters_read() or None

    return _wait_for(answer, executor, stop)[0]


def find_out(executor: Executor) -> Failure:
    """Find the cause of a WorkersLostError. It takes half a second, or longer if a rank ends slowly."""
    while (failure := executor.failure()) is None:
        transport.wait(CAUSE_LOOK_S, executor)
    return failure


def _wait_for(answer: Callable[[], T | None], executor: Executor, stop: Wakeup | None) -> T:
    watched = (executor, stop) if stop is not None else (executor,)
    try:
        while (found := answer()) is None:
            transport.wait(LOOK_EVERY_S, *watched)
            if stop is not None and stop.is_set():
                raise EngineError("stopped while the workers were starting")
    except WorkersLostError as error:
        raise find_out(executor).error from error
    return found
