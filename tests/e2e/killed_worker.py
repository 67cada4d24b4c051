"""A worker process that kills itself where a plan says so, see kill_plan.py; otherwise it serves like any other."""

import os
from typing import Any

from tests.e2e import light_worker
from tests.e2e.kill_plan import Points, kind
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol.step import BlockOp
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker import process, progress

LIGHT = "LIGHT_WORKERS"
"""The environment variable that says: without torch, see light_worker.py."""


def add_points_of_the_loop(points: Points) -> None:
    """Points before and after every kind of message that a worker sends, after each that it receives, and in and after
    steps."""
    loop: Any = process.WorkerLoop

    def said(when: str, arguments: tuple[Any, ...]) -> None:
        points.reach(f"{when} {kind(arguments[1])}")

    points.around(loop, "send", lambda a: said("before", a), lambda a, _: said("after", a))
    points.around(loop, "receive", None, lambda _, message: points.reach(f"got {kind(message)}"))
    points.before(process, "execute", "beginning of a message")
    points.before(progress.Progress, "advance", "in a layer")


def add_points_between_steps(points: Points, worker: Any) -> None:
    """Add points between the steps of one message. `worker` is the class that runs the steps."""
    num_done = 0

    def begin(_: Any) -> None:
        nonlocal num_done
        num_done = 0

    def before(_: Any) -> None:
        if num_done:
            points.reach("between two steps of a message")

    def after(*_: Any) -> None:
        nonlocal num_done
        num_done += 1

    points.around(process, "execute", begin, None)
    points.around(worker, "execute", before, after)


def add_points_of_a_step(points: Points) -> None:
    """Add points within a step, in modules that import torch."""
    from vllm_lite.worker import model_runner
    from vllm_lite.worker.memory.cache_engine import CacheEngine
    from vllm_lite.worker.step_parts import prompt_scores

    move = CacheEngine.execute

    def moving(self: CacheEngine, ops: Any) -> None:
        for op in BlockOp:
            own = [entry for entry in ops if entry[0] == op]
            where = f"in a {op.name.lower()}"
            if own and points.is_next(where):
                move(self, own[: (len(own) + 1) // 2])
                points.reach(where)
        move(self, ops)

    CacheEngine.execute = moving  # type: ignore[assignment, method-assign]
    points.before(prompt_scores, "score", "before scores of a prompt")
    points.after(prompt_scores, "score", "after scores of a prompt")
    points.after(model_runner.ModelRunner, "_logits", "before a draw")


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    points = Points(f"worker {settings.rank}")
    add_points_of_the_loop(points)
    load: Any = process.import_worker
    is_light = LIGHT in os.environ
    if is_light:
        load = light_worker.install()

    def loading() -> Any:
        worker = load()
        add_points_between_steps(points, worker)
        if not is_light:
            add_points_of_a_step(points)
        return worker

    process.import_worker = loading
    return process.process_main(settings, stop)


if __name__ == "__main__":
    run_child(main, WorkerSettings)
