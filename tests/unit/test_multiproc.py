"""The executor of worker processes, with fake workers, a clock that the test moves, and the in-process channel."""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_lite import transport
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineDeadError, EngineError, ModelError, VllmLiteError
from vllm_lite.executor import blocking, health, multiproc
from vllm_lite.executor.base import WorkersLostError
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import FromWorker, ToWorker, engine_to_worker, worker_to_engine
from vllm_lite.protocol.control import (
    Failed,
    KVGroupInfo,
    Load,
    Ready,
    Start,
    Started,
    WorkerHeartbeat,
    WorkerHello,
)
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput, StepOutputs, Steps
from vllm_lite.runtime import supervise
from vllm_lite.runtime.group_memory import ended_by
from vllm_lite.runtime.wakeup import Wakeup

GENERATION = 7
LIMIT_S = 20.0
READY = Ready(0, GENERATION, 100, 64, (KVGroupInfo("full", 1),), 1000, 50, (7,))
HELLO = WorkerHello(PROTOCOL_VERSION, "model", 0, GENERATION, 4711)

_numbers = itertools.count()


def beat(progress: int, *, waiting: bool = False) -> WorkerHeartbeat:
    return WorkerHeartbeat(0, GENERATION, progress, waiting)


class FakeWorker(supervise.Child):
    """A fake process that sends the messages of the test. `death`: the reason of its end, or None."""

    def __init__(self, rank: int, address: str) -> None:
        super().__init__(f"worker {rank}", lambda _: None)
        self.rank, self.pid = rank, 4000 + rank
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_workers: int, folder: Path, stages: int = 1) -> None:
        self.now_s = 1000.0
        self.workers: list[FakeWorker] = []
        self.plans: list[tuple[float, Callable[[], object]]] = []
        self.address = f"inproc://multiproc-{next(_numbers)}"
        for module in (multiproc, health):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(transport, "wait", self.wait)
        monkeypatch.setattr(supervise, "spawn", self.spawn)
        settings = {"load_format": "dummy", "heartbeat_timeout_s": LIMIT_S}
        config = EngineConfig.check(settings).resolve(max_position_embeddings=1000, dtype="float32", model_path="model")
        config = msgspec.structs.replace(config, tensor_parallel_size=num_workers, num_stages=stages)
        self.folder = folder / "group"
        self.settings: list[WorkerSettings] = []
        self.inherited: list[tuple[int, ...]] = []
        self.executor = MultiprocExecutor(
            config, self.address, GENERATION, "no.such.module", group_folder=str(self.folder)
        )

    def spawn(self, _module: str, settings: WorkerSettings, *_: object, fds: Any, **__: object) -> FakeWorker:
        self.settings.append(settings)
        self.inherited.append(fds)
        self.workers.append(FakeWorker(settings.rank, self.address))
        return self.workers[-1]

    @property
    def memory(self) -> int:
        """The descriptor of the group's memory."""
        group = self.settings[0].group
        assert group is not None
        return group.memory

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
        return blocking.load(self.executor, most_s, stop)

    def all_say(self, *messages: FromWorker) -> None:
        for worker in self.workers:
            worker.say(*messages)

    def begin(self) -> None:
        """Start up, with the messages that workers send at a start."""
        self.at(1.0, lambda: self.all_say(HELLO, READY))
        self.start()
        self.at(1.0, lambda: self.all_say(Started(0, GENERATION, 9.0)))
        blocking.allocate(self.executor, 100, 0, 600.0)
        for worker in self.workers:
            worker.heard()

    def pass_time(self, seconds: float, progress: Callable[[], int] | None = None) -> None:
        """Half a second at a time, with heartbeats if there is a `progress` to report."""
        for _ in range(int(2 * seconds)):
            self.now_s += 0.5
            if progress is not None:
                self.all_say(beat(progress()))
            self.executor.poll()

    def dies(self, act: Callable[[], object], error: type[VllmLiteError], message: str) -> None:
        with pytest.raises(VllmLiteError) as caught:
            act()
        was_lost = isinstance(caught.value, WorkersLostError)
        found = blocking.find_out(self.executor).error if was_lost else caught.value
        assert isinstance(found, error)
        assert re.search(message, str(found)), found


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    made = Host(monkeypatch, getattr(request, "param", 1), tmp_path)
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
    host.at(2.0, lambda: host.workers[0].say(Started(0, GENERATION, 9.0)))
    host.at(4.0, lambda: host.workers[1].say(Started(0, GENERATION, 4.0)))
    assert blocking.allocate(host.executor, 50, 5, 600.0) == 4.0
    assert [worker.heard() for worker in host.workers] == [[Load(GENERATION), Start(GENERATION, 50, 5)]] * 2


def test_silence_before_it_is_ready_ends_no_worker(host: Host) -> None:
    """On a cold disk the import of torch may hold the GIL, and the heartbeats, for longer than the limit."""
    host.at(1.0, lambda: host.workers[0].say(HELLO, beat(0)))
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


def test_the_death_of_a_worker_has_its_reported_reason(host: Host) -> None:
    def die() -> None:
        host.workers[0].death = "exit status 1"
        host.at(0.1, lambda: host.workers[0].say(Failed(0, GENERATION, "ModelError", "no such tensor", True)))

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
    """Results of a worker of an earlier engine at this address are applied to nothing."""
    host.begin()
    host.executor.submit(step(1))
    stale, result = ModelOutput(GENERATION - 1, 1, b""), ModelOutput(GENERATION, 1, b"")
    host.workers[0].say(stale, StepOutputs([stale, result]))
    assert host.executor.poll() == result
    assert host.executor.poll() is None


def test_garbage_and_strangers_change_nothing(host: Host) -> None:
    host.begin()
    host.workers[0].connection.send(b"\xc1")
    host.workers[0].connection.send(worker_to_engine.encode(WorkerHeartbeat(5, GENERATION, 1, False)))
    host.workers[0].connection.send(worker_to_engine.encode(Failed(-1, GENERATION, "Error", "not of this host", False)))
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
        host.workers[0].say(beat(0))
        host.executor.poll()
    host.now_s += 2.0
    host.dies(host.executor.poll, EngineDeadError, "worker 1 .* silent")


def test_the_last_reported_counts_of_experts_stay(host: Host) -> None:
    host.begin()
    host.workers[0].say(msgspec.structs.replace(beat(1), expert_tokens=[[], [3, 4]]), beat(2))
    host.executor.poll()
    assert host.executor.expert_tokens() == [[], [3, 4]]


def test_a_worker_with_heartbeats_and_without_progress_is_stuck(host: Host) -> None:
    host.begin()
    host.executor.submit(step(1))
    host.pass_time(LIMIT_S - 1.0, lambda: 3)
    host.dies(
        lambda: host.pass_time(2.0, lambda: 3),
        EngineDeadError,
        r"worker 0 \(pid 4711\) is stuck: no layer in 20 s",
    )


def test_a_long_step_that_continues_is_not_stuck(host: Host) -> None:
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


def test_a_worker_that_does_not_read_is_lost(host: Host) -> None:
    host.begin()
    host.workers[0].connection.close()
    host.dies(lambda: host.executor.submit(step(1)), EngineDeadError, "worker 0 cannot be reached any more")


# ---- several ranks


def waited(rank: int | None) -> Failed:
    return Failed(0, GENERATION, "RankLostError", "a rank has ended", False, rank)


BUG = Failed(0, GENERATION, "ValueError", "a bug", False)


def test_a_worker_alone_has_no_group(host: Host) -> None:
    host.begin()
    assert (host.settings[0].group, host.inherited, host.folder.exists()) == (None, [()], False)


@two_workers
def test_workers_of_a_group_inherit_its_memory_and_share_a_private_folder(host: Host) -> None:
    host.begin()
    assert [settings.rank for settings in host.settings] == [0, 1]
    assert host.settings[0].group == host.settings[1].group
    assert host.inherited == [(host.memory,)] * 2
    assert os.stat(host.folder).st_mode & 0o777 == 0o700
    memory = os.dup(host.memory)
    host.executor.close()
    assert not host.folder.exists()
    assert ended_by(memory) == (True, None), "a rank that is in a step leaves it"
    os.close(memory)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(host.memory)


@two_workers
@pytest.mark.parametrize(
    "change", [{"vocab_size": 51}, {"max_model_len": 999}, {"eos_token_ids": ()}, {"groups": ()}], ids=str
)
def test_ranks_of_two_models_are_refused(host: Host, change: dict[str, Any]) -> None:
    host.at(1.0, lambda: host.workers[0].say(HELLO, READY))
    host.at(2.0, lambda: host.workers[1].say(HELLO, msgspec.structs.replace(READY, **change)))
    host.dies(host.start, EngineError, f"workers 0 and 1 do not serve the same model: {next(iter(change))} is")


@two_workers
def test_blocks_of_the_largest_size_are_counted_on(host: Host) -> None:
    host.at(1.0, lambda: host.workers[0].say(HELLO, READY))
    host.at(1.0, lambda: host.workers[1].say(HELLO, msgspec.structs.replace(READY, block_bytes=96, num_blocks=200)))
    ready = host.start()
    assert (ready.num_blocks, ready.block_bytes) == (READY.num_blocks, 96)


@two_workers
def test_messages_of_another_life_are_dropped(host: Host) -> None:
    host.begin()
    host.workers[1].say(msgspec.structs.replace(BUG, generation=GENERATION - 1))
    assert host.executor.poll() is None


@two_workers
def test_only_rank_0_answers(host: Host) -> None:
    host.begin()
    host.executor.submit(step(1))
    output = ModelOutput(GENERATION, 1, b"")
    host.workers[1].say(output, StepOutputs([output]))
    assert host.executor.poll() is None
    host.workers[0].say(output)
    assert host.executor.poll() == output


@two_workers
def test_all_ranks_get_the_same_steps(host: Host) -> None:
    host.begin()
    host.executor.submit(step(1), step(2))
    assert [worker.heard() for worker in host.workers] == [[Steps([step(1), step(2)])]] * 2


@two_workers
def test_a_start_that_takes_too_long_names_the_rank_that_the_others_wait_for(host: Host) -> None:
    host.at(1.0, lambda: host.workers[0].say(HELLO, beat(0, waiting=True)))
    host.at(1.0, lambda: host.workers[1].say(HELLO, beat(0)))
    host.dies(lambda: host.start(most_s=60.0), EngineError, "worker 1 is not ready after 60 s")


@two_workers
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("late_s", [0.0, 0.2, 0.4])
def test_a_rank_that_raises_is_named_however_late_it_speaks(host: Host, culprit: int, late_s: float) -> None:
    """The one that waited for it may be heard first."""
    host.begin()
    host.executor.submit(step(1))
    host.workers[1 - culprit].say(waited(culprit))
    host.workers[1 - culprit].death = "exit status 1"
    host.at(late_s, lambda: host.workers[culprit].say(BUG))
    host.dies(host.executor.poll, EngineDeadError, f"^worker {culprit} failed: ValueError: a bug$")


@two_workers
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_was_killed_is_named(host: Host, culprit: int, is_first: bool) -> None:
    host.begin()
    host.executor.submit(step(1))

    def die() -> None:
        host.workers[culprit].death = "killed by SIGKILL"

    def leave() -> None:
        host.workers[1 - culprit].say(waited(None))
        host.workers[1 - culprit].death = "exit status 1"

    first, second = (die, leave) if is_first else (leave, die)
    first()
    host.at(0.3, second)
    began_s = host.now_s
    reason = rf"^worker {culprit} \(pid 4711\) died: killed by SIGKILL$"
    host.dies(host.executor.poll, EngineDeadError, reason)
    assert host.now_s - began_s <= multiproc.LATE_MESSAGE_S


@two_workers
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_others_leave_their_waits_while_the_cause_is_looked_for(host: Host, culprit: int) -> None:
    host.begin()
    host.workers[culprit].death = "exit status 0"
    ended: list[tuple[bool, int | None]] = []
    host.at(0.1, lambda: ended.append(ended_by(host.memory)))
    host.dies(host.executor.poll, EngineDeadError, f"worker {culprit} .* died: exit status 0")
    assert ended == [(True, None)]


@two_workers
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits(host: Host, culprit: int) -> None:
    host.begin()
    host.executor.submit(step(1))
    other = host.workers[1 - culprit]
    began_s = host.now_s

    def pass_time(hung: list[WorkerHeartbeat]) -> None:
        for _ in range(int(2 * LIMIT_S) + 2):
            host.now_s += 0.5
            other.say(beat(9, waiting=True))
            host.workers[culprit].say(*hung)
            host.executor.poll()

    host.dies(lambda: pass_time([beat(9)]), EngineDeadError, f"worker {culprit} .* is stuck")
    assert host.now_s - began_s <= LIMIT_S + 1.0


@two_workers
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_stopped_while_it_waits_is_named(host: Host, culprit: int) -> None:
    host.begin()
    host.executor.submit(step(1))
    host.all_say(beat(9, waiting=True))
    host.executor.poll()

    def pass_time() -> None:
        for _ in range(int(2 * LIMIT_S) + 2):
            host.now_s += 0.5
            host.workers[1 - culprit].say(beat(9, waiting=True))
            host.executor.poll()

    host.dies(pass_time, EngineDeadError, f"worker {culprit} .* has been silent")


@two_workers
def test_a_rank_that_does_not_read_is_lost(host: Host) -> None:
    host.begin()
    host.workers[1].connection.close()
    host.dies(lambda: host.executor.submit(step(1)), EngineDeadError, "worker 1 cannot be reached any more")
