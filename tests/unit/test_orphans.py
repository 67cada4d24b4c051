"""The children of a killed process are ended, even stopped ones; those of other processes are left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.test_supervise import CHILD, DEADLINE_S, wait_for, wait_gone
from vllm_lite.client.engines import orphans

CODE = """
import sys, time
from vllm_lite.runtime import supervise
from tests.unit.test_supervise import CHILD, Settings
supervise.spawn(CHILD, Settings(sys.argv[1], "wait"), "child", print)
time.sleep(60)
"""


class Pair(NamedTuple):
    """A process and its child."""

    parent: "subprocess.Popen[bytes]"
    child: int


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Pair]]:
    started: list[Pair] = []

    def start(name: str) -> Pair:
        parent = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path / name)])
        started.append(Pair(parent, int(wait_for(tmp_path / name))))
        return started[-1]

    yield start
    for parent, child in started:
        parent.kill()
        parent.wait(DEADLINE_S)
        wait_gone(child)


def test_a_stopped_child_of_a_killed_process_is_ended(start: Callable[[str], Pair]) -> None:
    dead, other = start("dead"), start("other")
    os.kill(dead.child, signal.SIGSTOP)  # in which it notices nothing
    dead.parent.kill()
    dead.parent.wait(DEADLINE_S)
    assert orphans.end_children_of(dead.parent.pid, DEADLINE_S) == 0
    wait_gone(dead.child)
    assert Path(f"/proc/{other.child}/cmdline").read_bytes().split(b"\0")[3] == CHILD.encode()


def test_without_children_there_is_nothing_to_wait_for() -> None:
    assert orphans.end_children_of(2**22 + 1, DEADLINE_S) == 0
