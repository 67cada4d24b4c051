"""Message of a worker that fails: whether it began, or was left alone by another rank. Without torch."""

import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, ModelError, RankLostError
from vllm_lite.process_settings import WorkerGroup, WorkerSettings
from vllm_lite.protocol.control import Failed
from vllm_lite.runtime.group_memory import create_group_memory, end_group, ended_by
from vllm_lite.worker.membership import Membership

RANK, GENERATION = 1, 7
CONFIG = EngineConfig().resolve(max_position_embeddings=8, dtype="float32", model_path="model")


class FakeCommunicator:
    def __init__(self, lost: int | None = None) -> None:
        self.lost, self.waits = lost, False
        self.calls: list[str] = []

    def lost_rank(self) -> int | None:
        return self.lost

    def is_waiting(self) -> bool:
        return self.waits

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def memory() -> Iterator[int]:
    """The engine's descriptor; the worker's is a duplicate."""
    fd = create_group_memory()
    yield fd
    os.close(fd)


@pytest.fixture
def member(memory: int) -> Iterator[Membership]:
    group = WorkerGroup(os.dup(memory), "/nowhere")
    made = Membership(WorkerSettings(CONFIG, "ipc:///nowhere", RANK, GENERATION, None, group))
    yield made
    made.close()


def connect(member: Membership, meet: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """`meet` makes the communicator."""
    select = SimpleNamespace(connect=lambda *_: meet())
    monkeypatch.setitem(sys.modules, "vllm_lite.parallel.select", select)
    monkeypatch.setattr("vllm_lite.parallel.select", select, raising=False)
    member.connect(None, 0)  # type: ignore[arg-type]


def test_an_error_of_its_own_is_reported_as_it_is(member: Membership) -> None:
    assert member.failed(ValueError("a bug")) == Failed(RANK, GENERATION, "ValueError", "a bug", False)


@pytest.mark.parametrize("error", [ModelError("no"), ConfigError("no")])
def test_bad_input_is_marked(member: Membership, error: Exception) -> None:
    assert member.failed(error).bad_input


@pytest.mark.parametrize("error", [RankLostError("gone"), RuntimeError("a call failed"), ConfigError("no")])
def test_after_another_rank_has_ended_the_group_it_only_waited(
    member: Membership, memory: int, error: Exception
) -> None:
    end_group(memory, 0)
    failed = member.failed(error)
    assert (failed.kind, failed.waited_for, failed.bad_input) == ("RankLostError", 0, False)
    assert failed.message in ("gone", f"{type(error).__name__}: {error}")


def test_after_the_engine_has_ended_the_group_it_is_not_the_cause(member: Membership, memory: int) -> None:
    end_group(memory)
    failed = member.failed(RuntimeError("a call failed"))
    assert (failed.kind, failed.message, failed.waited_for) == ("RankLostError", "RuntimeError: a call failed", None)


def test_the_communicator_may_know_of_a_loss_that_the_memory_does_not_show(
    member: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(member, lambda: FakeCommunicator(lost=3), monkeypatch)
    assert member.failed(OSError("connection reset")).waited_for == 3


def test_its_own_mark_in_the_memory_is_no_excuse(member: Membership, memory: int) -> None:
    member.abort()
    assert ended_by(memory) == (True, RANK)
    assert member.failed(ValueError("a bug")).waited_for is None


def test_the_first_rank_to_end_the_group_stays_in_the_memory(member: Membership, memory: int) -> None:
    end_group(memory, 0)
    member.abort()
    assert ended_by(memory) == (True, 0)


def test_it_waits_when_its_communicator_does(member: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = FakeCommunicator()
    assert not member.is_waiting()
    connect(member, lambda: communicator, monkeypatch)
    assert not member.is_waiting()
    communicator.waits = True
    assert member.is_waiting()


def test_it_waits_while_it_meets_the_others(member: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Meeting(FakeCommunicator):
        def __init__(self) -> None:
            super().__init__()
            seen.append(member.is_waiting())

    connect(member, Meeting, monkeypatch)
    assert (seen, member.is_waiting()) == ([True], False)


def test_closing_leaves_the_group_and_keeps_the_engines_descriptor(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.dup(memory)
    member = Membership(WorkerSettings(CONFIG, "ipc:///nowhere", RANK, GENERATION, None, WorkerGroup(own, "/nowhere")))
    communicator = FakeCommunicator()
    connect(member, lambda: communicator, monkeypatch)
    member.abort()
    member.close()
    member.close()
    assert communicator.calls == ["abort", "close"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
    os.fstat(memory)


def test_membership_of_a_single_worker() -> None:
    member = Membership(WorkerSettings(CONFIG, "ipc:///nowhere", 0, GENERATION))
    assert not member.is_waiting()
    assert member.failed(RankLostError("?")).waited_for is None
    member.abort()
    member.close()
