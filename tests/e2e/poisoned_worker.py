"""A worker process that some requests kill: with SIGKILL, in each step that computes a prompt that begins with POISON.

It does so only as long as the file is there that the environment variable POISON names, so that a test can say when.
Whoever starts the process names this module. Where a server does, which takes no such name, `poison_all` has every
worker below it poisoned.
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


def poison(worker: Any) -> Any:
    """Let instances of a class of workers die."""
    poisoned, execute = Poison(), worker.execute

    def dying(self: Any, step: SchedulerOutput) -> Any:
        poisoned.take(step)
        return execute(self, step)

    worker.execute = dying
    return worker


def poison_all(folder: Path, file: Path) -> dict[str, str]:
    """The environment of a process: workers that descend from it are poisoned while `file` exists."""
    (folder / "sitecustomize.py").write_text(AT_START)
    return {VARIABLE: str(file), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


ROOT = Path(__file__).parents[2]
AT_START = """
import sys

if "vllm_lite.worker.process" in sys.orig_argv:
    from importlib.abc import MetaPathFinder
    from importlib.util import find_spec

    class Finder(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "vllm_lite.worker.worker":
                return None
            sys.meta_path.remove(self)
            found = find_spec(name)
            execute = found.loader.exec_module

            def exec_module(module):
                from tests.e2e.poisoned_worker import poison

                execute(module)
                poison(module.Worker)

            found.loader.exec_module = exec_module
            return found

    sys.meta_path.insert(0, Finder())
"""


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    load: Any = light_worker.install() if LIGHT in os.environ else process.import_worker
    process.import_worker = lambda: poison(load())
    return process.process_main(settings, stop)


if __name__ == "__main__":
    run_child(main, WorkerSettings)
