"""A worker process for tests, one rank of which fails in a given way: FAILURE="RANK WHEN HOW", for example "1 step
raise".

WHEN is "start", before it meets the others, or "step", inside the third message of steps. Without FAILURE it serves
like any other worker. So do the workers of every group but the first.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_lite.process_settings import WorkerSettings
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker import process, progress

VARIABLE = "FAILURE"
STEPS_BEFORE = 2


def fail_by_raising() -> None:
    raise ValueError("injected")


def spin() -> None:
    """Spin in Python: other threads, such as the heartbeat, still run."""
    while True:
        pass


def hold() -> None:
    """Hang in native code that keeps the interpreter's lock: no other thread runs any more."""
    ctypes.PyDLL(None).pause()


class NeverDone:
    """The event of a GPU that hangs."""

    def query(self) -> bool:
        return False


def wait_for_a_hung_gpu(settings: WorkerSettings) -> None:
    from vllm_lite.kernels.cuda.patience import Wait
    from vllm_lite.worker.worker import PATIENCE

    Wait(NeverDone(), "a step", PATIENCE * settings.config.heartbeat_timeout_s).wait()


WAYS: dict[str, Callable[[], None]] = {
    "raise": fail_by_raising,
    "exit": lambda: sys.exit(0),
    "spin": spin,
    "hold": hold,
}


def fail_in_a_step(fail: Callable[[], None]) -> None:
    """Fail in the middle of a step if layers are run one by one, otherwise at its end."""
    execute, advance, num_messages = process.execute, progress.Progress.advance, 0

    def counting(*arguments: Any) -> Any:
        nonlocal num_messages
        num_messages += 1
        return execute(*arguments)

    def failing(self: progress.Progress) -> None:
        if num_messages > STEPS_BEFORE:
            fail()
        advance(self)

    process.execute = counting  # type: ignore[assignment]
    progress.Progress.advance = failing  # type: ignore[method-assign]


def fail_at_the_start(fail: Callable[[], None]) -> None:
    def failing() -> Any:
        fail()

    process.import_worker = failing


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    rank, when, how = os.environ.get(VARIABLE, "-1 step raise").split()
    if settings.rank == int(rank) and settings.generation == 1:
        ways = WAYS | {"hang": partial(wait_for_a_hung_gpu, settings)}
        (fail_in_a_step if when == "step" else fail_at_the_start)(ways[how])
    return process.process_main(settings, stop)


if __name__ == "__main__":
    run_child(main, WorkerSettings)
