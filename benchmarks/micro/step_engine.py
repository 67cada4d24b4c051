"""The engine's process with a ledger. Entry point of a child, see step.py."""

from micro.ledger import Ledger
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.process import EngineProcess, process_main
from vllm_lite.engine.request import Produced
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.step import ModelOutput
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport.interface import poller


def _process_main(settings: EngineSettings, stop: Wakeup) -> int:
    ledger = Ledger()
    ledger.watch(type(poller()), {"poll": "wait"})
    ledger.watch(MultiprocExecutor, {"poll": "receive", "submit": "send"})
    ledger.watch(EngineCore, {"begin": "schedule", "finish": "update"})
    _end_steps(ledger)
    try:
        return process_main(settings, stop)
    finally:
        ledger.save("engine")


def _end_steps(ledger: Ledger) -> None:
    """End the ledger's step after each pass of the engine's loop that published something, which may be several steps
    of the scheduler."""
    num_steps = 0
    finish, publish = EngineCore.finish, ledger.timed("publish", EngineProcess._publish)  # noqa: SLF001

    def finish_one(core: EngineCore, output: ModelOutput) -> list[Produced]:
        nonlocal num_steps
        num_steps += 1
        return finish(core, output)

    def publish_and_end_step(engine: EngineProcess, core: EngineCore, produced: list[Produced]) -> None:
        nonlocal num_steps
        publish(engine, core, produced)
        if num_steps:
            ledger.end_step(streams=len(produced) // num_steps, steps=num_steps)
            num_steps = 0

    EngineCore.finish = finish_one  # type: ignore[method-assign,assignment]
    EngineProcess._publish = publish_and_end_step  # type: ignore[method-assign,assignment]  # noqa: SLF001


if __name__ == "__main__":
    supervise.run_child(
        _process_main, EngineSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )
