"""The executor of worker processes, with fake workers, a clock that the test moves, and the in-process channel."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_lite import transport
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineDeadError, EngineError, ModelError, VllmLiteError
from vllm_lite.executor import multiproc
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import FromWorker, ToWorker, engine_to_worker, worker_to_engine
from vllm_lite.protocol.control import (
    Failed,
    KVGroupInfo,
    Ready,
    Shutdown,
    Start,
    Started,
    WorkerHeartbeat,
    WorkerHello,
)
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput, StepOutputs, Steps
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup

GENERATION = 7
LIMIT_S = 20.0
READY = Ready(0, 100, 64, (KVGroupInfo("full", 1),), 1000, 50, (7,))
HELLO = WorkerHello(PROTOCOL_VERSION, "model", 0, 4711)

_numbers = itertools.count()


class FakeWorker:
    """A process that says what the test has it say. `death` is how it ended."""

    def __init__(self, rank: int, address: str) -> None:
        self.rank = rank
        self.death: str | None = None
        self.was_stopped = False
        self.connection = transport.connect(address, f"worker-{rank}".encode())

    def say(self, *messages: FromWorker) -> None:
        for message in messages:
            with_rank = msgspec.structs.replace(message, rank=self.rank) if hasattr(message, "rank") else message
            self.connection.send(worker_to_engine.encode(with_rank))

    def heard(self) -> list[ToWorker]:
        messages = []
        while (payload := self.connection.recv()) is not None:
            messages.append(engine_to_worker.decode(payload))
        return messages

    def exited(self) -> str | None:
        return self.death

    def stop(self, grace_s: float) -> None:
        assert grace_s > 0
        self.was_stopped = True


class Host:
    """An executor and its workers. Waiting moves the clock, and what is planned for that time happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
        self.now_s = 1000.0
        self.workers: list[FakeWorker] = []
        self.plans: list[tuple[float, Callable[[], object]]] = []
        self.address = f"inproc://multiproc-{next(_numbers)}"
        monkeypatch.setattr(multiproc, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(transport, "wait", self.wait)
        monkeypatch.setattr(supervise, "spawn", self.spawn)
        settings = {"load_format": "dummy", "heartbeat_timeout_s": LIMIT_S}
        config = EngineConfig.check(settings).resolve(max_position_embeddings=1000, dtype="float32", model_path="model")
        config = msgspec.structs.replace(config, tensor_parallel_size=num_workers)
        self.executor = MultiprocExecutor(config, self.address, GENERATION, "no.such.module")

    def spawn(self, _module: str, settings: Any, *_: object, **__: object) -> FakeWorker:
        self.workers.append(FakeWorker(settings.rank, self.address))
        return self.workers[-1]

    def wait(self, timeout_s: float, *_: object) -> bool:
        self.now_s = min([self.now_s + timeout_s, *(at_s for at_s, _ in self.plans)])
        due = [act for at_s, act in self.plans if at_s <= self.now_s]
        self.plans = [plan for plan in self.plans if plan[0] > self.now_s]
        for act in due:
            act()
        return bool(due)

    def at(self, after_s: float, act: Callable[[], object]) -> None:
        self.plans.append((self.now_s + after_s, act))

    def start(self, most_s: float = 600.0, stop: Wakeup | None = None) -> Ready:
        return self.executor.start(most_s, stop or Wakeup())

    def all_say(self, *messages: FromWorker) -> None:
        for worker in self.workers:
            worker.say(*messages)

    def begin(self) -> None:
        """All workers say what they say at a start."""
        self.at(1.0, lambda: self.all_say(HELLO, READY))
        self.start()
        self.at(1.0, lambda: self.all_say(Started(0, 9.0)))
        self.executor.allocate(100, 0)
        for worker in self.workers:
            worker.heard()

    def pass_time(self, seconds: float, progress: Callable[[], int] | None = None) -> None:
        """Half a second at a time, with heartbeats if there is a `progress` to report."""
        for _ in range(int(2 * seconds)):
            self.now_s += 0.5
            if progress is not None:
                self.all_say(WorkerHeartbeat(0, progress()))
            self.executor.poll()

    def dies(self, act: Callable[[], object], error: type[VllmLiteError], message: str) -> None:
        with pytest.raises(error, match=message):
            act()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(monkeypatch, getattr(request, "param", 1))
    yield made
    made.executor.close()
    for worker in made.workers:
        worker.connection.close()


two_workers = pytest.mark.parametrize("host", [2], indirect=True)


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput(GENERATION, number, [], [])


# ---- start


@two_workers
def test_all_workers_start_and_the_smallest_counts(host: Host) -> None:
    small = msgspec.structs.replace(READY, num_blocks=60)
    host.at(3.0, lambda: host.workers[0].say(HELLO, READY))
    host.at(9.0, lambda: host.workers[1].say(HELLO, small))
    assert host.start().num_blocks == 60
    host.at(2.0, lambda: host.workers[0].say(Started(0, 9.0)))
    host.at(4.0, lambda: host.workers[1].say(Started(0, 4.0)))
    assert host.executor.allocate(50, 5) == 4.0
    assert [worker.heard() for worker in host.workers] == [[Start(GENERATION, 50, 5)]] * 2


def test_silence_before_it_is_ready_ends_no_worker(host: Host) -> None:
    """On a cold disk the import of torch may hold the GIL, and the heartbeats, for longer than the limit."""
    host.at(1.0, lambda: host.workers[0].say(HELLO, WorkerHeartbeat(0, 0)))
    host.at(5 * LIMIT_S, lambda: host.workers[0].say(READY))
    assert host.start() == READY


def test_a_start_has_a_deadline_nevertheless(host: Host) -> None:
    host.at(1.0, lambda: host.workers[0].say(HELLO))
    host.dies(lambda: host.start(most_s=60.0), EngineError, "worker 0 is not ready after 60 s")


def test_a_start_can_be_stopped(host: Host) -> None:
    stop = Wakeup()
    host.at(3.0, stop.set)
    host.dies(lambda: host.start(stop=stop), EngineError, "stopped while the workers were starting")
    stop.close()


def test_a_worker_that_dies_says_why_if_it_can(host: Host) -> None:
    def die() -> None:
        host.workers[0].death = "exit status 1"
        host.at(0.1, lambda: host.workers[0].say(Failed(0, "ModelError", "no such tensor", True)))

    host.at(2.0, die)
    host.dies(host.start, ModelError, "^no such tensor$")


def test_a_worker_of_another_version_is_refused(host: Host) -> None:
    host.at(1.0, lambda: host.workers[0].say(msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION + 1)))
    host.dies(host.start, EngineError, f"worker 0 speaks protocol {PROTOCOL_VERSION + 1}")


# ---- steps


def test_results_come_in_order_and_one_by_one(host: Host) -> None:
    host.begin()
    (worker,) = host.workers
    host.executor.submit(step(1))
    host.executor.submit(step(2), step(3))
    assert worker.heard() == [step(1), Steps([step(2), step(3)])]
    assert host.executor.poll() is None
    outputs = [ModelOutput(GENERATION, number, b"") for number in (1, 2, 3)]
    worker.say(outputs[0], StepOutputs(outputs[1:]))
    assert [host.executor.poll() for _ in range(4)] == [*outputs, None]


def test_results_of_another_life_are_dropped(host: Host) -> None:
    """What a worker of an earlier engine at this address still had to say is applied to nothing."""
    host.begin()
    host.executor.submit(step(1))
    stale, result = ModelOutput(GENERATION - 1, 1, b""), ModelOutput(GENERATION, 1, b"")
    host.workers[0].say(stale, StepOutputs([stale, result]))
    assert host.executor.poll() == result
    assert host.executor.poll() is None


def test_garbage_and_strangers_change_nothing(host: Host) -> None:
    host.begin()
    host.workers[0].connection.send(b"\xc1")
    host.workers[0].connection.send(worker_to_engine.encode(WorkerHeartbeat(5, 1)))
    host.workers[0].connection.send(worker_to_engine.encode(Failed(-1, "Error", "not of this host", False)))
    assert host.executor.poll() is None


# ---- watching


def test_a_silent_worker_is_dead(host: Host) -> None:
    host.begin()
    host.pass_time(LIMIT_S)
    host.dies(lambda: host.pass_time(1.0), EngineDeadError, r"worker 0 \(pid 4711\) has been silent for 20 s")


@two_workers
def test_each_worker_is_listened_to(host: Host) -> None:
    host.begin()
    for _ in range(int(LIMIT_S) - 1):
        host.now_s += 1.0
        host.workers[0].say(WorkerHeartbeat(0, 0))
        host.executor.poll()
    host.now_s += 2.0
    host.dies(host.executor.poll, EngineDeadError, "worker 1 .* silent")


def test_a_worker_that_breathes_without_progress_is_stuck(host: Host) -> None:
    host.begin()
    host.executor.submit(step(1))
    host.pass_time(LIMIT_S - 1.0, lambda: 3)
    host.dies(
        lambda: host.pass_time(2.0, lambda: 3),
        EngineDeadError,
        r"worker 0 \(pid 4711\) is stuck: no layer in 20 s",
    )


def test_a_long_step_that_goes_on_is_not_stuck(host: Host) -> None:
    host.begin()
    host.executor.submit(step(1))
    host.pass_time(5 * LIMIT_S, lambda: int(host.now_s / (LIMIT_S - 2.0)))


def test_time_without_work_is_no_hang(host: Host) -> None:
    host.begin()
    host.executor.submit(step(0))
    host.workers[0].say(ModelOutput(GENERATION, 0, b""))
    assert host.executor.poll() is not None
    host.pass_time(10 * LIMIT_S, lambda: 3)
    host.executor.submit(step(1))
    host.pass_time(LIMIT_S - 1.0, lambda: 3)  # the step has all of its time
    host.executor.submit(step(2))  # which a step behind it does not add to
    host.dies(lambda: host.pass_time(2.0, lambda: 3), EngineDeadError, "is stuck")


def test_a_worker_that_ended_is_dead(host: Host) -> None:
    host.begin()
    host.workers[0].death = "killed by SIGKILL"
    host.dies(host.executor.poll, EngineDeadError, r"worker 0 \(pid 4711\) died: killed by SIGKILL")
    host.workers[0].connection.close()
    host.workers[0].death = None
    host.dies(lambda: host.executor.submit(step(1)), EngineDeadError, "worker 0 cannot be reached any more")


def test_closing_ends_every_worker(host: Host) -> None:
    host.begin()
    host.executor.close()
    assert host.workers[0].heard() == [Shutdown()]
    assert host.workers[0].was_stopped
