"""The engine's process with a ledger. Entry point of a child, see step.py."""

from typing import Any

from vllm_lite import supervise
from vllm_lite.bench.ledger import Ledger
from vllm_lite.config import EngineSettings
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.process import EngineProcess, process_main
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.transport.interface import poller
from vllm_lite.wakeup import Wakeup


def _process_main(settings: EngineSettings, stop: Wakeup) -> int:
    ledger = Ledger()
    ledger.watch(type(poller()), {"poll": "wait"})
    ledger.watch(MultiprocExecutor, {"poll": "receive", "submit": "send"})
    ledger.watch(EngineCore, {"begin": "schedule", "finish": "update"})
    publish = ledger.timed("publish", EngineProcess._publish)  # noqa: SLF001 (the end of a turn of its loop)

    def publish_and_turn(engine: EngineProcess, core: EngineCore, produced: list[Any]) -> None:
        publish(engine, core, produced)
        if produced:
            ledger.end_step(streams=len(produced))

    EngineProcess._publish = publish_and_turn  # type: ignore[method-assign,assignment]  # noqa: SLF001
    try:
        return process_main(settings, stop)
    finally:
        ledger.save("engine")


if __name__ == "__main__":
    supervise.run_child(
        _process_main, EngineSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )
