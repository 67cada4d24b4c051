"""Entry point of a worker that imports torch before it has its settings, which come from an engine that has to import
what it needs itself, and from a server that does.

It begins only where settings can change nothing of it: without a GPU there is one way to import torch, and threads are
counted and bound afterwards. An environment that has OpenMP place its threads does so when torch is loaded.
"""

import os
import threading
from contextlib import suppress

from vllm_lite.process_settings import WorkerSettings
from vllm_lite.runtime import machine, torch_import
from vllm_lite.runtime.supervise import run_child
from vllm_lite.worker.process import import_worker, process_main, quiet_openmp

PLACES_THREADS = frozenset({"GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"})
"""Variables by which OpenMP chooses CPUs among those that its process may use when it is loaded."""


def knows_how() -> bool:
    """Whether torch can be imported as any worker of this machine would."""
    return PLACES_THREADS.isdisjoint(os.environ) and (machine.hides_gpus() or not machine.has_driver())


def _import() -> None:
    with suppress(Exception):  # the worker finds the same, when there is somebody to tell
        import_worker()


def main() -> None:
    if knows_how():
        quiet_openmp()
        torch_import.put_off()
        threading.Thread(target=_import, name="imports torch").start()
    run_child(process_main, WorkerSettings)


if __name__ == "__main__":
    main()
