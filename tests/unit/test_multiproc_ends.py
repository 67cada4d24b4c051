"""The executor of worker processes, asked in parts, as an engine that serves meanwhile asks it: the start, the cause
of a failure, the end. With the fake workers of test_multiproc.py."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.deadlines import scaled
from tests.unit.test_multiproc import (
    BUG,
    GENERATION,
    HELLO,
    LIMIT_S,
    READY,
    FakeWorker,
    Host,
    beat,
    host,
    step,
    two_workers,
    waited,
)
from vllm_lite.engine.process import IDLE_LOOK_MS
from vllm_lite.errors import EngineDeadError, EngineError
from vllm_lite.executor import multiproc
from vllm_lite.executor.base import WorkersLostError
from vllm_lite.executor.multiproc import GONE_S, LATE_MESSAGE_S, MOST_APART_S
from vllm_lite.protocol.control import Load, Shutdown, Start, Started
from vllm_lite.runtime.group_memory import end_group

__all__ = ["host"]

DEADLINE_S = scaled(20.0)
NEARLY_S = LIMIT_S / 3
"""Less than the limit for silence, and an interval between looks at the workers that a running engine keeps."""


def start_up(host: Host) -> None:
    host.executor.spawn()
    host.executor.begin_load(60.0)
    host.all_say(HELLO, READY)
    assert host.executor.ready() is not None
    host.executor.begin_allocate(100, 0, 60.0)
    host.all_say(Started(0, GENERATION, 9.0))
    assert host.executor.started() == 9.0


def lose(act: Callable[[], object]) -> None:
    with pytest.raises(WorkersLostError):
        act()


@two_workers
def test_workers_load_when_they_may_and_not_before(host: Host) -> None:
    executor = host.executor
    executor.spawn()
    host.workers[0].say(HELLO)
    assert executor.ready() is None
    host.now_s += 1000.0
    assert executor.ready() is None, "a group on standby has no deadline"
    assert [worker.heard() for worker in host.workers] == [[], []]
    executor.begin_load(60.0)
    assert [worker.heard() for worker in host.workers] == [[Load(GENERATION)], []]
    host.workers[1].say(HELLO)
    assert executor.ready() is None
    assert [worker.heard() for worker in host.workers] == [[], [Load(GENERATION)]], "each once"
    host.all_say(READY)
    assert executor.ready() == READY
    executor.begin_allocate(50, 5, 60.0)
    assert executor.started() is None
    assert host.workers[1].heard() == [Start(GENERATION, 50, 5)]


@pytest.mark.parametrize(
    ("settings", "is_read"),
    [
        ({"load_format": "auto"}, True),
        ({"load_format": "auto", "quantization": "int4", "device": "cpu"}, True),
        ({"load_format": "auto", "weight_cache": "cache", "device": "cpu"}, True),
        ({"load_format": "auto", "weight_cache": "cache", "quantization": "int4", "device": "cuda"}, True),
        ({"load_format": "auto", "weight_cache": "cache", "quantization": "int4", "device": "cpu"}, False),
        ({"load_format": "dummy"}, False),
    ],
)
def test_the_checkpoint_is_read_ahead_unless_its_weights_lie_packed(
    host: Host, settings: dict[str, Any], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, read = host.executor, list[str]()
    monkeypatch.setattr(multiproc, "start_reading_ahead", read.append)
    executor._config = msgspec.structs.replace(executor._config, **settings)
    executor.begin_load(60.0, "other")
    assert read == ["other"] * is_read


def test_every_part_of_a_start_has_its_deadline(host: Host) -> None:
    executor = host.executor
    executor.spawn()
    executor.begin_load(60.0)
    host.all_say(HELLO)
    host.now_s += 59.0
    assert executor.ready() is None
    host.now_s += 1.0
    with pytest.raises(EngineError, match=r"^worker 0 is not ready after 60 s$"):
        executor.ready()
    host.all_say(READY)
    assert executor.ready() == READY
    executor.begin_allocate(50, 5, 10.0)
    host.now_s += 10.0
    with pytest.raises(EngineError, match=r"^worker 0 is not started after 10 s$"):
        executor.started()


def test_a_worker_that_dies_on_standby_is_noticed(host: Host) -> None:
    host.executor.spawn()
    host.workers[0].death = "exit status 1"
    lose(host.executor.ready)


def test_a_kill_explains_itself(host: Host) -> None:
    start_up(host)
    host.workers[0].death = "killed by SIGKILL"
    lose(host.executor.poll)
    failure = host.executor.failure()
    assert failure is not None
    assert (failure.rank, failure.cause) == (0, "died")


@two_workers
def test_a_cause_that_may_still_come_is_waited_for(host: Host) -> None:
    start_up(host)
    host.workers[0].say(waited(1))
    host.workers[0].death = "exit status 1"
    lose(host.executor.poll)
    assert host.executor.failure() is None
    lose(host.executor.poll)  # it stays lost meanwhile
    host.now_s += LATE_MESSAGE_S / 2
    host.workers[1].say(BUG)
    failure = host.executor.failure()
    assert failure is not None
    assert (failure.rank, failure.cause, str(failure.error)) == (1, "failed", "worker 1 failed: ValueError: a bug")


@pytest.mark.parametrize("death", ["exit status 1", "killed by SIGSEGV"])
def test_a_cause_that_does_not_come_is_not_waited_for_long(host: Host, death: str) -> None:
    start_up(host)
    host.workers[0].death = death
    lose(host.executor.poll)
    host.now_s += LATE_MESSAGE_S - 0.1
    assert host.executor.failure() is None
    host.now_s += 0.1
    failure = host.executor.failure()
    assert failure is not None
    assert isinstance(failure.error, EngineDeadError)
    assert str(failure.error) == f"worker 0 (pid 4711) died: {death}"


def check_named_by_its_end(host: Host) -> None:
    """Let rank 1 end, which has not said anything yet."""
    assert host.executor.failure() is None
    host.workers[1].death = "exit status 0"
    assert host.executor.failure() is None, "its last message may be on its way"
    host.now_s += LATE_MESSAGE_S
    failure = host.executor.failure()
    assert failure is not None
    assert str(failure.error) == "worker 1 (pid 4711) died: exit status 0"


@two_workers
@pytest.mark.parametrize("late_s", [LATE_MESSAGE_S, NEARLY_S])
@pytest.mark.parametrize("named", [1, None])
def test_a_rank_that_is_slow_to_leave_is_named_by_its_end(host: Host, late_s: float, named: int | None) -> None:
    """On a busy machine the one that waited for it is heard of seconds before; gloo does not say whom it lost."""
    start_up(host)
    host.workers[0].say(waited(named))
    lose(host.executor.poll)
    host.now_s += late_s
    check_named_by_its_end(host)


@two_workers
def test_the_rank_that_ended_the_group_first_is_waited_for(host: Host) -> None:
    """An error of another one may be due to that."""
    start_up(host)
    end_group(host.memory, 1)
    host.workers[0].say(BUG)
    lose(host.executor.poll)
    host.now_s += NEARLY_S
    assert host.executor.failure() is None
    host.workers[1].say(msgspec.structs.replace(BUG, rank=1, message="the first"))
    failure = host.executor.failure()
    assert failure is not None
    assert str(failure.error) == "worker 1 failed: ValueError: the first"


@two_workers
def test_a_rank_that_cannot_be_reached_is_named_by_its_end(host: Host) -> None:
    """Its socket closes before its process ends."""
    start_up(host)
    host.workers[1].connection.close()
    lose(lambda: host.executor.submit(step(1)))
    host.now_s += NEARLY_S
    check_named_by_its_end(host)


@two_workers
def test_the_last_message_of_a_rank_that_is_slow_to_leave_is_waited_for(host: Host) -> None:
    start_up(host)
    host.workers[0].say(waited(1))
    lose(host.executor.poll)
    host.now_s += NEARLY_S
    host.workers[1].death = "exit status 1"
    assert host.executor.failure() is None
    host.now_s += LATE_MESSAGE_S - 0.1
    host.workers[1].say(BUG)
    failure = host.executor.failure()
    assert failure is not None
    assert str(failure.error) == "worker 1 failed: ValueError: a bug"


@two_workers
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_rank_that_neither_speaks_nor_ends_is_waited_for_as_one_that_hangs(host: Host, is_heard: bool) -> None:
    start_up(host)
    host.all_say(beat(1))
    assert host.executor.poll() is None
    host.workers[0].say(waited(1))
    lose(host.executor.poll)
    for _ in range(4):
        host.now_s += LIMIT_S / 4 - 0.1
        assert host.executor.failure() is None
        host.workers[1].say(*[beat(1)] * is_heard)
    host.now_s += 0.5
    failure = host.executor.failure()
    assert failure is not None
    words = (
        "was lost, and did not say why; worker 0 waited for it" if is_heard else "(pid 4711) has been silent for 20 s"
    )
    assert str(failure.error).startswith(f"worker 1 {words}")


@two_workers
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_memory_names_the_rank_that_could_not_speak(host: Host, culprit: int) -> None:
    host.begin()
    end_group(host.memory, culprit)
    host.workers[1 - culprit].say(waited(None))
    for after_s in range(5, int(LIMIT_S) + 1, 5):  # it lives on, and is not heard to say why
        host.at(after_s, lambda: host.workers[culprit].say(beat(1)))
    host.dies(host.executor.poll, EngineDeadError, f"^worker {culprit} was lost, .* worker {1 - culprit} waited for it")


@two_workers
def test_reports_of_all_ranks_about_each_other_need_no_further_wait(host: Host) -> None:
    """No other worker is left that could report a cause."""
    start_up(host)
    host.workers[0].say(waited(None))
    host.workers[1].say(msgspec.structs.replace(waited(None), rank=1))
    lose(host.executor.poll)
    host.now_s += LATE_MESSAGE_S
    assert host.executor.failure() is not None


@two_workers
def test_the_end_of_a_rank_does_not_wait_for_one_that_is_idle(host: Host) -> None:
    start_up(host)
    host.workers[1].death = "killed by SIGSEGV"
    lose(host.executor.poll)
    host.now_s += LATE_MESSAGE_S
    failure = host.executor.failure()
    assert failure is not None
    assert str(failure.error) == "worker 1 (pid 4711) died: killed by SIGSEGV"


def test_a_group_that_is_well_has_not_failed(host: Host) -> None:
    start_up(host)
    assert host.executor.failure() is None


def test_the_engine_does_not_wait_for_the_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    start_up(host)
    let_go, stopping = threading.Event(), threading.Event()

    def stop(worker: FakeWorker, _grace_s: float) -> None:
        stopping.set()
        assert let_go.wait(DEADLINE_S)
        worker.death = "killed by SIGTERM"

    monkeypatch.setattr(FakeWorker, "stop", stop)
    host.executor.end()
    host.executor.end()
    assert stopping.wait(DEADLINE_S)
    assert not host.executor.has_ended()
    let_go.set()
    assert host.executor.are_gone.wait(DEADLINE_S)
    assert host.executor.has_ended()
    assert host.workers[0].heard()[-1:] == [Shutdown()]


def test_a_worker_that_cannot_be_ended_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    start_up(host)
    let_go = threading.Event()
    monkeypatch.setattr(FakeWorker, "stop", lambda *_: let_go.wait(DEADLINE_S))
    host.executor.end()
    assert not host.executor.has_ended()
    host.now_s += GONE_S
    with pytest.raises(EngineError, match=r"^worker 0 \(pid 4711\) cannot be ended$"):
        host.executor.has_ended()
    let_go.set()


def test_closing_ends_every_worker(host: Host) -> None:
    host.begin()
    host.executor.close()
    assert host.workers[0].heard() == [Shutdown()]
    assert host.workers[0].was_stopped


def test_an_idle_engine_looks_often_enough_to_count_as_running() -> None:
    assert IDLE_LOOK_MS / 1000 < MOST_APART_S


@two_workers
@pytest.mark.parametrize("works", [False, True])
def test_time_while_the_engine_was_stopped_hardly_counts_as_silence(host: Host, works: bool) -> None:
    """If a machine is stopped, its workers are as well; one that is silent afterwards is found."""
    host.begin()
    if works:
        host.executor.submit(step(1))
    for _ in range(2):
        host.now_s += 1000.0
        assert host.executor.poll() is None
    host.pass_time(LIMIT_S - 2 * MOST_APART_S)
    host.all_say(beat(0))
    assert host.executor.poll() is None
    host.workers[0].say(beat(1))
    host.now_s += LIMIT_S - 1.0
    assert host.executor.poll() is None
    host.workers[0].say(beat(2))
    host.now_s += MOST_APART_S
    assert host.executor.poll() is None, "so much of the first wait was none"
    host.workers[0].say(beat(3))
    host.now_s += MOST_APART_S
    host.dies(host.executor.poll, EngineDeadError, "worker 1 .* has been silent")
