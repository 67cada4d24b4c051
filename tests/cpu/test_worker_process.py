"""The worker's conversation with an engine that the test plays: in a thread over both transports, and as a process."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.deadlines import scaled
from tests.fakes import Exits
from vllm_lite import transport
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.config import EngineConfig
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import (
    FromWorker,
    ToWorker,
    engine_to_worker,
    pack_tokens,
    unpack_tokens,
    worker_to_engine,
)
from vllm_lite.protocol.control import (
    Failed,
    Imported,
    Load,
    Ready,
    Shutdown,
    Start,
    Started,
    WorkerHeartbeat,
    WorkerHello,
)
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Finish, ModelOutput, NewRequest, SchedulerOutput
from vllm_lite.protocol.transfers import StoredKeys, TierUsage
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Delivery
from vllm_lite.worker import process
from vllm_lite.worker.disk.transfers import DiskTransfers
from vllm_lite.worker.membership import Membership

DEADLINE_S = scaled(60.0)
"""Deadline of every wait; nothing here takes a tenth of it on an idle machine."""
GENERATION = 11

M = TypeVar("M")


class Engine:
    """The engine's end of the wire."""

    def __init__(self, address: str) -> None:
        self.listener = transport.bind(address)
        self.heartbeats: list[WorkerHeartbeat] = []

    def receive(self, kind: type[M]) -> M:
        """The next message that is not a heartbeat, nor one of every later group; it must be a `kind`."""
        message = self.next(lambda message: not isinstance(message, WorkerHeartbeat | Imported))
        assert isinstance(message, kind), message
        return message

    def next(self, wanted: Callable[[FromWorker], bool]) -> FromWorker:
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            item = self.listener.recv()
            if item is None:
                transport.wait(end_s - time.monotonic(), self.listener)
                continue
            peer, message = item[0], worker_to_engine.decode(item[1])
            if isinstance(message, WorkerHeartbeat):
                assert peer == b"worker-0-heartbeat"
                self.heartbeats.append(message)
            else:
                assert peer == b"worker-0"
            if isinstance(message, WorkerHello):
                self.send(Load(GENERATION))
            if wanted(message):
                return message
        raise TimeoutError(f"nothing of the kind within {DEADLINE_S} s")

    def send(self, message: ToWorker) -> None:
        assert self.listener.send(b"worker-0", engine_to_worker.encode(message)) is Delivery.SENT

    def start_up(self) -> Ready:
        self.receive(WorkerHello)
        ready = self.receive(Ready)
        self.send(Start(GENERATION, ready.num_blocks, 0))
        assert self.receive(Started).swap_blocks_per_s == 0, "there is no host pool"
        return ready


class WorkerThread:
    """`process.main` in a thread, as --single-process runs it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.stop = Wakeup()
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
        self.thread.start()

    def _run(self, settings: WorkerSettings) -> None:
        self.code = process.main(settings, self.stop)

    def join(self) -> int | None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self.code


def settings_for(model: Path, address: str, **overrides: Any) -> WorkerSettings:
    config = EngineConfig(num_gpu_blocks_override=20, max_num_batched_tokens=64, max_num_seqs=4, **overrides)
    path = str(model)
    if (model / "config.json").exists():
        spec = load_spec(path)
        config = config.resolve(max_position_embeddings=spec.max_position_embeddings, dtype="float32", model_path=path)
    else:
        config = config.resolve(max_position_embeddings=8, dtype="float32", model_path=path)
    return WorkerSettings(config, address, 0, GENERATION)


@pytest.fixture
def ipc() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="vl-") as folder:
        yield f"ipc://{folder}/w"


@pytest.fixture(params=["inproc", "ipc"])
def engine(request: pytest.FixtureRequest, ipc: str) -> Iterator[Engine]:
    engine = Engine(f"inproc://{request.node.name}" if request.param == "inproc" else ipc)
    yield engine
    engine.listener.close()


def prompt_step(step: int, generation: int = GENERATION) -> SchedulerOutput:
    prompt = [5, 6, 7, 8, 9]
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, logprobs=1)
    return SchedulerOutput(generation, step, [], [NewRequest(0, pack_tokens(prompt), 5, sampling, 0, 0, 5, [[1]])])


def test_a_whole_conversation(engine: Engine, tiny_checkpoint: Path) -> None:
    settings = settings_for(tiny_checkpoint, engine.listener.address)
    worker = WorkerThread(settings)
    hello = engine.receive(WorkerHello)
    assert (hello.version, hello.model, hello.rank) == (PROTOCOL_VERSION, settings.config.model, 0)
    assert hello.pid == os.getpid()
    ready = engine.receive(Ready)
    assert (ready.generation, ready.num_blocks) == (GENERATION, 20)
    engine.send(Start(GENERATION, 20, 6))
    started = engine.receive(Started)
    assert started.generation == GENERATION
    assert started.swap_blocks_per_s > 100

    engine.send(prompt_step(1))
    first = engine.receive(ModelOutput)
    assert (first.generation, first.step, len(unpack_tokens(first.tokens))) == (GENERATION, 1, 1)
    assert first.logprobs is not None
    for step in (2, 3):  # two in flight
        engine.send(SchedulerOutput(GENERATION, step, [], [Continue(0, 1, [])]))
    assert [engine.receive(ModelOutput).step for _ in range(2)] == [2, 3]
    engine.send(SchedulerOutput(GENERATION, 4, [], [Finish(0)]))
    assert engine.receive(ModelOutput).tokens == b""

    engine.send(Shutdown())
    assert worker.join() == 0


def test_a_worker_reports_the_disks_keys_before_it_is_ready(
    ipc: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that waited for it are scheduled at once."""
    engine, found = Engine(ipc), StoredKeys(0, GENERATION, [bytes(33)], [], TierUsage())
    monkeypatch.setattr(DiskTransfers, "take", lambda _: [found])
    settings = settings_for(tiny_checkpoint, ipc, kv_cache_dir=str(tmp_path / "kv"))
    worker = WorkerThread(settings)
    engine.receive(WorkerHello)
    engine.receive(Ready)
    engine.send(Start(GENERATION, 20, 0))
    assert engine.receive(StoredKeys).added == [bytes(33)]
    engine.next(lambda message: isinstance(message, Started))
    engine.send(Shutdown())
    assert worker.join() == 0
    engine.listener.close()


def test_hearts_beat_and_show_progress(engine: Engine, tiny_checkpoint: Path) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.start_up()
    engine.next(lambda message: isinstance(message, WorkerHeartbeat) and message.waiting)  # for the engine
    before = engine.heartbeats[-1].progress
    engine.send(prompt_step(1))
    engine.receive(ModelOutput)
    engine.next(lambda message: isinstance(message, WorkerHeartbeat) and message.progress > before)
    engine.send(Shutdown())
    assert worker.join() == 0


def test_heartbeats_tell_whether_a_rank_waits_for_another(
    engine: Engine, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, import_worker = threading.Event(), process.import_worker

    def make(*arguments: Any, **names: Any) -> object:
        assert let_go.wait(DEADLINE_S)
        return import_worker()(*arguments, **names)

    monkeypatch.setattr(process, "import_worker", lambda: make)
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.receive(WorkerHello)
    for waits in (True, False):
        monkeypatch.setattr(Membership, "is_waiting", lambda _, waits=waits: waits)
        heartbeat = engine.next(lambda message: isinstance(message, WorkerHeartbeat) and message.waiting is waits)  # noqa: B023
        assert isinstance(heartbeat, WorkerHeartbeat)
    let_go.set()
    engine.receive(Ready)
    engine.send(Shutdown())
    assert worker.join() == 0


def test_the_reason_is_on_its_way_before_the_others_are_let_go(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise those that it leaves would often be heard first."""
    aborted = []

    def abort(_: Membership) -> None:
        aborted.append(engine.receive(Failed))

    monkeypatch.setattr(Membership, "abort", abort)
    worker = WorkerThread(settings_for(tmp_path, engine.listener.address))
    engine.receive(WorkerHello)
    assert worker.join() == 1
    assert [failed.kind for failed in aborted] == ["ModelError"]


def test_a_worker_ends_on_a_stop_message(engine: Engine, tiny_checkpoint: Path) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.start_up()
    worker.stop.set()
    assert worker.join() == 0


def test_a_worker_ends_when_the_engine_has_gone(engine: Engine, tiny_checkpoint: Path) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.start_up()
    engine.listener.close()
    assert worker.join() == 1


def test_a_bad_model_is_the_users_fault(engine: Engine, tmp_path: Path) -> None:
    worker = WorkerThread(settings_for(tmp_path, engine.listener.address))
    engine.receive(WorkerHello)
    failed = engine.receive(Failed)
    assert (failed.rank, failed.generation) == (0, GENERATION)
    assert (failed.kind, failed.bad_input, failed.waited_for) == ("ModelError", True, None)
    assert "config.json" in failed.message
    assert worker.join() == 1


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (prompt_step(1, generation=GENERATION + 1), "generation"),
        (SchedulerOutput(GENERATION, 1, [], [Continue(77, 1, [])]), "handle 77"),
        (Start(GENERATION, 20, 0), "expected a SchedulerOutput, got Start"),
    ],
)
def test_invalid_messages_end_the_worker_with_the_reason(
    engine: Engine, tiny_checkpoint: Path, message: ToWorker, complaint: str
) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.start_up()
    engine.send(message)
    failed = engine.receive(Failed)
    assert (failed.kind, failed.bad_input) == ("ProtocolError", False)
    assert complaint in failed.message
    assert worker.join() == 1


@pytest.mark.parametrize("sizes", [(1 << 36, 0), (20, 1 << 36)])
def test_memory_that_is_not_there_is_said_with_its_flags(
    engine: Engine, tiny_checkpoint: Path, sizes: tuple[int, int]
) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.receive(WorkerHello)
    engine.receive(Ready)
    engine.send(Start(GENERATION, *sizes))
    failed = engine.receive(Failed)
    assert (failed.kind, failed.bad_input) == ("ConfigError", True)
    for words in ("GiB of KV cache on cpu (--num-gpu-blocks-override 20)", "(--swap-space 0) cannot be allocated: "):
        assert words in failed.message
    assert worker.join() == 1


def test_garbage_on_the_wire_ends_the_worker(engine: Engine, tiny_checkpoint: Path) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address))
    engine.start_up()
    engine.listener.send(b"worker-0", b"\xc1 not msgpack")
    assert "could not be decoded" in engine.receive(Failed).message
    assert worker.join() == 1


def test_an_engine_that_says_nothing_is_not_waited_for_for_ever(engine: Engine, tiny_checkpoint: Path) -> None:
    worker = WorkerThread(settings_for(tiny_checkpoint, engine.listener.address, ready_timeout_s=0.01))
    engine.receive(WorkerHello)
    engine.receive(Ready)
    assert "was silent for" in engine.receive(Failed).message
    assert worker.join() == 1


# ---- as a process


def test_a_process_serves_and_ends(ipc: str, tiny_checkpoint: Path) -> None:
    engine, exits = Engine(ipc), Exits()
    child = supervise.spawn("vllm_lite.worker.process", settings_for(tiny_checkpoint, ipc), "worker 0", exits)
    try:
        assert engine.receive(WorkerHello).pid == child.pid
        engine.receive(Ready)
        engine.send(Start(GENERATION, 20, 0))
        engine.receive(Started)
        engine.send(prompt_step(1))
        assert len(engine.receive(ModelOutput).tokens) == 4
        engine.send(Shutdown())
        assert exits.wait() == "exit status 0"
    finally:
        child.stop(1.0)
        engine.listener.close()


def test_the_last_message_of_a_process_arrives(ipc: str, tmp_path: Path) -> None:
    engine, exits = Engine(ipc), Exits()
    child = supervise.spawn("vllm_lite.worker.process", settings_for(tmp_path, ipc), "worker 0", exits)
    try:
        engine.receive(WorkerHello)
        assert engine.receive(Failed).bad_input
        assert exits.wait() == "exit status 1"
    finally:
        child.stop(1.0)
        engine.listener.close()


def test_sigterm_ends_a_process_at_once(ipc: str, tiny_checkpoint: Path) -> None:
    engine, exits = Engine(ipc), Exits()
    child = supervise.spawn("vllm_lite.worker.process", settings_for(tiny_checkpoint, ipc), "worker 0", exits)
    try:
        engine.receive(WorkerHello)  # it is importing torch now
        os.kill(child.pid, signal.SIGTERM)
        assert exits.wait() == "killed by SIGTERM"
    finally:
        child.stop(1.0)
        engine.listener.close()
