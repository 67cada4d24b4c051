"""A worker process that some requests kill: with SIGKILL, in each step that computes a prompt that begins with POISON.

It does so only as long as the file is there that the environment variable POISON names, so that a test can say when.
"""

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e import light_worker
from tests.e2e.killed_worker import LIGHT
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.step import Continue, Draft, Fork, NewRequest, Resume, SchedulerOutput
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker import process

VARIABLE = "POISON"
POISON = 377


class Poison:
    """Knows which of the sequences that a worker has seen are poisoned."""

    def __init__(self) -> None:
        self.file = Path(os.environ[VARIABLE])
        self.handles: set[int] = set()

    def take(self, step: SchedulerOutput) -> None:
        """Die of a step, or let it pass."""
        computed = set()
        for entry in step.entries:
            if isinstance(entry, NewRequest):
                is_poisoned = unpack_tokens(entry.tokens)[0] == POISON
                (self.handles.add if is_poisoned else self.handles.discard)(entry.handle)
            elif isinstance(entry, Fork):
                (self.handles.add if entry.parent in self.handles else self.handles.discard)(entry.child)
            if isinstance(entry, NewRequest | Continue | Resume | Draft):
                computed.add(entry.handle)
        if computed & self.handles and self.file.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    load: Any = light_worker.install() if LIGHT in os.environ else process.import_worker
    poison = Poison()

    def loading() -> Any:
        worker = load()
        execute = worker.execute

        def dying(self: Any, step: SchedulerOutput) -> Any:
            poison.take(step)
            return execute(self, step)

        worker.execute = dying
        return worker

    process.import_worker = loading
    return process.process_main(settings, stop)


if __name__ == "__main__":
    run_child(main, WorkerSettings)
