"""Children die with their parents, parents hear of their children. Real processes, a deadline on every wait."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.deadlines import scaled
from tests.fakes import Exits
from vllm_lite.runtime import supervise

DEADLINE_S = scaled(30.0)
CHILD = "tests.unit.child_for_supervise"


class Settings(msgspec.Struct):
    marker: str
    mode: str


def wait_for(path: Path) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline_s, f"{path} did not appear"
        time.sleep(0.01)
    return path.read_text().strip()


def wait_gone(pid: int) -> None:
    """Wait until `pid` is not a running process any more."""
    start = time.monotonic()
    while time.monotonic() - start < DEADLINE_S:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on")


@pytest.mark.parametrize(
    ("mode", "reason"), [("return 0", "exit status 0"), ("return 3", "exit status 3"), ("raise", "exit status 1")]
)
def test_exit_status_is_reported(tmp_path: Path, mode: str, reason: str) -> None:
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), mode), "child", exits)
    assert exits.wait() == reason
    assert child.exited() == reason


def test_settings_arrive_and_a_kill_is_named(tmp_path: Path) -> None:
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "wait"), "child", exits)
    assert int(wait_for(tmp_path / "m")) == child.pid
    assert child.exited() is None
    os.kill(child.pid, signal.SIGKILL)
    assert exits.wait() == "killed by SIGKILL"


def test_a_child_has_a_folder_though_that_of_its_parent_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that torch loads end a process without one."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "where"), "child", exits)
    assert wait_for(tmp_path / "m") == "/"
    child.stop(DEADLINE_S)


def test_stop_asks_first(tmp_path: Path) -> None:
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "graceful"), "child", exits)
    wait_for(tmp_path / "m")
    child.stop(DEADLINE_S)
    assert child.exited() == "exit status 7"


def test_stop_kills_a_process_that_ignores_it(tmp_path: Path) -> None:
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "deaf"), "child", exits)
    wait_for(tmp_path / "m")
    child.stop(0.2)
    assert child.exited() == "killed by SIGKILL"


@pytest.mark.parametrize("mode", ["wait", "deaf"])
def test_child_ends_when_its_parent_is_killed(tmp_path: Path, mode: str) -> None:
    """The cleanup runs too, since the parent cannot run its own."""
    (tmp_path / "run").mkdir()
    code = (
        "import time; from vllm_lite.runtime import supervise; from tests.unit.test_supervise import CHILD, Settings; "
        f"supervise.spawn(CHILD, Settings({str(tmp_path / 'm')!r}, {mode!r}), 'child', print); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        pid = int(wait_for(tmp_path / "m"))
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
    wait_gone(pid)
    assert wait_for(tmp_path / "m.cleaned") == "cleaned"


def test_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG fires when the starting *thread* ends; that thread must not be the caller's."""
    exits = Exits()
    children: list[supervise.Child] = []
    settings = Settings(str(tmp_path / "m"), "wait")
    thread = threading.Thread(target=lambda: children.append(supervise.spawn(CHILD, settings, "child", exits)))
    thread.start()
    thread.join(DEADLINE_S)
    wait_for(tmp_path / "m")
    assert not exits.event.wait(0.5)
    children[0].stop(DEADLINE_S)


def test_a_thread_can_stand_in_for_the_process(tmp_path: Path) -> None:
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "graceful"), "child", exits, in_thread=True)
    assert int(wait_for(tmp_path / "m")) == os.getpid()
    child.stop(DEADLINE_S)
    assert exits.wait() == "exit status 7"


def test_threads_that_have_ended_leave_no_descriptor(tmp_path: Path) -> None:
    def start_and_stop() -> int:
        child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "graceful"), "child", Exits(), in_thread=True)
        wait_for(tmp_path / "m")
        child.stop(DEADLINE_S)
        return len(os.listdir("/proc/self/fd"))

    before = start_and_stop()
    assert [start_and_stop() for _ in range(3)] == [before] * 3


def test_a_stopped_child_is_ended_without_being_killed(tmp_path: Path) -> None:
    exits = Exits()
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "default"), "child", exits)
    os.kill(int(wait_for(tmp_path / "m")), signal.SIGSTOP)
    child.stop(DEADLINE_S)
    assert exits.wait() == "killed by SIGTERM"


class MeetingChild(supervise.Child):
    """A child whose stop() returns only after stop() of all others has been called."""

    def __init__(self, meeting: threading.Barrier) -> None:
        super().__init__("child", lambda _reason: None)
        self.meeting = meeting

    def stop(self, grace_s: float) -> None:
        self.meeting.wait(grace_s)
        self._reason = "stopped"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_children_are_stopped_side_by_side(count: int) -> None:
    meeting = threading.Barrier(count or 1)
    children = [MeetingChild(meeting) for _ in range(count)]
    supervise.stop_all(children, DEADLINE_S)
    assert [child.exited() for child in children] == ["stopped"] * count


@pytest.mark.parametrize("turn", range(5))
def test_a_stopped_child_is_seen_to_be_and_ends_at_once(tmp_path: Path, turn: int) -> None:
    """Whichever of its threads the kernel gives the signal to: several turns, as that is not always the main one."""
    del turn
    child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "graceful"), "child", Exits())
    wait_for(tmp_path / "m")
    assert not child.is_stopped()
    began_s = time.monotonic()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert child.is_stopped()
    child.stop(2 * DEADLINE_S)
    assert not child.is_stopped()
    assert child.exited() == "exit status 7", "it was not killed"
    assert time.monotonic() - began_s < DEADLINE_S


@pytest.fixture
def early() -> Iterator[int]:
    """The process of a child that waits for its settings."""
    supervise.spawn_early(CHILD)
    yield supervise._early[CHILD].pid
    supervise.end_early()


def test_spawn_uses_the_child_started_early_once(early: int, tmp_path: Path) -> None:
    exits = [Exits(), Exits()]
    children = [supervise.spawn(CHILD, Settings(str(tmp_path / str(i)), "wait"), f"c{i}", exits[i]) for i in range(2)]
    assert int(wait_for(tmp_path / "0")) == early
    assert int(wait_for(tmp_path / "1")) == children[1].pid != early
    supervise.end_early()  # has nothing to end
    assert children[0].exited() is None
    supervise.stop_all(children, DEADLINE_S)
    assert [one.wait() for one in exits] == ["exit status 7"] * 2, "stop() asks a child that has its settings to end"


def test_another_entry_point_may_replace_the_module(tmp_path: Path) -> None:
    child = supervise.spawn("no.such.module", Settings(str(tmp_path / "m"), "wait"), "c", Exits(), entry=CHILD)
    assert int(wait_for(tmp_path / "m")) == child.pid
    child.stop(DEADLINE_S)


def test_a_child_that_inherits_descriptors_is_not_the_early_one(early: int, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        child = supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "wait"), "c", Exits(), fds=(file.fileno(),))
    assert int(wait_for(tmp_path / "m")) == child.pid != early
    child.stop(DEADLINE_S)


def test_unused_early_children_are_killed_at_once(early: int) -> None:
    supervise.end_early()
    assert not Path(f"/proc/{early}").exists()


def test_a_child_that_died_before_its_settings_came_is_reported_by_spawn(early: int, tmp_path: Path) -> None:
    os.kill(early, signal.SIGKILL)
    wait_gone(early)
    exits = Exits()
    supervise.spawn(CHILD, Settings(str(tmp_path / "m"), "wait"), "child", exits)
    assert exits.wait() == "killed by SIGKILL"


def test_a_child_that_waits_for_its_settings_ends_with_its_parent() -> None:
    script = f"""
import os, signal
from vllm_lite.runtime import supervise
supervise.spawn_early({CHILD!r})
print(supervise._early[{CHILD!r}].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    wait_gone(int(done.stdout))
