"""An engine process that kills itself at points of a plan (kill_plan.py); so do its workers."""

import msgspec

from tests.e2e.kill_plan import Points
from vllm_lite.engine import process
from vllm_lite.engine.client_port import ClientPort
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.scheduling import in_flight
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.process_settings import EngineSettings
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup

WORKERS = "tests.e2e.killed_worker"


def add_points(points: Points) -> None:
    points.after(ClientPort, "open", "after Welcome")
    points.before(ClientPort, "say_dying", "before Dying")
    points.after(ClientPort, "push", "in the middle of publishing")
    points.after(EngineCore, "add", "after a request was accepted")
    points.after(EngineCore, "fork", "after a fork was accepted")
    points.after(EngineCore, "abort", "after an abort")
    points.before(MultiprocExecutor, "submit", "between schedule and submit")
    points.after(MultiprocExecutor, "submit", "after submit")
    points.after(EngineCore, "finish", "between results and publish")
    points.after(process.EngineProcess, "_publish", "between publish and the next step")
    points.before(EngineCore, "lose_workers", "before the loss of workers")
    points.after(EngineCore, "lose_workers", "after the loss of workers")
    points.before(EngineCore, "resume", "before workers are back")
    points.after(EngineCore, "resume", "after workers are back")
    points.before(MultiprocExecutor, "_spawn", "before a worker is started")
    points.after(MultiprocExecutor, "_spawn", "after a worker was started")
    points.before(MultiprocExecutor, "close", "before the workers end")


def main(settings: EngineSettings, stop: Wakeup) -> int:
    add_points(Points("engine"))
    in_flight.MESSAGE_S, in_flight.MEASURED_STEPS = 60.0, 4  # steps travel together soon, however slow the machine is
    return process.process_main(msgspec.structs.replace(settings, worker_module=WORKERS), stop)


if __name__ == "__main__":
    supervise.run_child(
        main, EngineSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )
