"""The engine process's loop, with a core and an executor that the test makes."""

import gc
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.process import EngineProcess, frozen_objects
from vllm_lite.engine.workers.groups import WorkerGroups
from vllm_lite.errors import EngineError
from vllm_lite.executor.base import Executor
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.step import ModelOutput
from vllm_lite.runtime.wakeup import Wakeup

CONFIG = EngineConfig().resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
METER = SimpleNamespace(counters=SimpleNamespace())
QUESTIONS = SimpleNamespace(is_on=False, advance=lambda: None)


def make_groups(executor: object) -> WorkerGroups:
    return WorkerGroups(lambda _: cast("Executor", executor), CONFIG)


def test_it_never_waits_with_an_output_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in flight may end together: one message wakes the loop, and none follows to wake it for the other."""
    outputs = deque(ModelOutput(1, step, b"") for step in range(1, 4))
    finished: list[int] = []
    stop = Wakeup()

    class Watched:
        def poll(self, _timeout_ms: int) -> list[Any]:
            assert not finished or not outputs
            return []

    def finish(output: ModelOutput) -> list[Any]:
        finished.append(output.step)
        if not outputs:
            stop.set()
        return []

    monkeypatch.setattr("vllm_lite.engine.process.poller", lambda *_: Watched())
    scheduler = SimpleNamespace(requests={}, step=0, has_workers=True)
    adapters = SimpleNamespace(receive=lambda *_: None, send=lambda *_: None)
    core = SimpleNamespace(
        transfers=None,
        scheduler=scheduler,
        expire=list,
        finish=finish,
        begin=lambda: False,
        meter=METER,
        adapter_loader=adapters,
        in_flight=(),
        prefix_questions=QUESTIONS,
    )
    executor = SimpleNamespace(poll=lambda: outputs.popleft() if outputs else None)
    engine = EngineProcess(EngineSettings(CONFIG, f"ipc://{tmp_path}/engine", "none"), stop)
    try:
        assert engine.serve(cast("EngineCore", core), make_groups(executor)) == 0
    finally:
        engine.port.close()
        stop.close()
    assert finished == [1, 2, 3]


@pytest.mark.parametrize(("is_stopped", "level"), [(True, "INFO"), (False, "ERROR")])
def test_a_start_that_the_user_stopped_is_no_error(
    is_stopped: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("the workers did not start")

    monkeypatch.setattr("vllm_lite.engine.process.WorkerGroups", fail)
    monkeypatch.setattr("vllm_lite.engine.process.REFUSAL_PATIENCE_S", 0.0)
    stop = Wakeup()
    if is_stopped:
        stop.set()
    with caplog.at_level("INFO", logger="vllm_lite"):
        assert EngineProcess(EngineSettings(CONFIG, f"ipc://{tmp_path}/engine", "none"), stop).run() == 1
    stop.close()
    assert [(each.levelname, each.message) for each in caplog.records] == [(level, "the workers did not start")]


def test_a_fault_of_the_engine_reaches_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Any]:
        raise RuntimeError("the scheduler lost a block")

    stop = Wakeup()
    scheduler = SimpleNamespace(requests={}, step=0)
    core = SimpleNamespace(scheduler=scheduler, expire=fail, meter=METER, prefix_questions=QUESTIONS)
    engine = EngineProcess(EngineSettings(CONFIG, f"ipc://{tmp_path}/engine", "none"), stop)
    sent: list[tuple[str, bool]] = []
    monkeypatch.setattr("vllm_lite.engine.process.poller", lambda *_: SimpleNamespace(poll=lambda _timeout_ms: []))
    monkeypatch.setattr(engine.port, "say_dying", lambda text, *, is_final: sent.append((text, is_final)))
    try:
        with pytest.raises(RuntimeError, match="lost a block"):
            engine.serve(cast("EngineCore", core), make_groups(None))
    finally:
        engine.port.close()
        stop.close()
    assert sent == [("the engine failed: RuntimeError('the scheduler lost a block')", False)]


def test_objects_of_the_start_are_excluded_from_collections() -> None:
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    made: list[list[int]] = []

    def make() -> None:
        assert not gc.isenabled()
        made.extend([number] for number in range(1000))
        raise ValueError("no such policy")

    try:
        with pytest.raises(ValueError, match="no such policy"), frozen_objects():
            make()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
