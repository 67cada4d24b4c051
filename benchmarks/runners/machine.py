"""Figures of /proc about a tree of processes and about all other processes. Linux, standard library only."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_QUIET_CORES = 0.08
_SPIN = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    sum(range(100_000))
"""


class _Process(NamedTuple):
    parent: int
    cpu_s: float


def _processes() -> dict[int, _Process]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # ended meanwhile
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                found[int(name)] = _Process(int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICKS_S)
    return found


def tree(root: int) -> dict[int, float]:
    """The processes that descend from `root`, itself included, each with the seconds of CPU it has used."""
    processes = _processes()
    members = {}
    for pid, process in processes.items():
        at = pid
        while at > 1 and at != root:
            at = processes[at].parent if at in processes else 0
        if at == root:
            members[pid] = process.cpu_s
    return members


class CpuTimes(NamedTuple):
    at_s: float
    busy_s: float  # of all processes
    steal_s: float  # what the host gave to other guests
    own_s: float  # of this process and its descendants

    @classmethod
    def now(cls) -> "CpuTimes":
        with Path("/proc/stat").open() as file:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
        busy = (user + nice + system + irq + softirq) * _TICKS_S
        return cls(time.monotonic(), busy, steal * _TICKS_S, sum(tree(os.getpid()).values()))

    def foreign_since(self, then: "CpuTimes") -> float:
        """Cores that other processes used since `then`, including other guests of the host."""
        others_s = self.busy_s - then.busy_s - (self.own_s - then.own_s)
        return (max(0.0, others_s) + self.steal_s - then.steal_s) / (self.at_s - then.at_s)


def wait_until_quiet(limit_s: float) -> None:
    """Return when no other process has used the machine for half a second, or after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        then = CpuTimes.now()
        time.sleep(0.5)
        if CpuTimes.now().foreign_since(then) < _QUIET_CORES:
            return


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that compute all the time until the block ends."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in spinning:
            if process.stdout is not None:
                process.stdout.readline()
        yield
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


class PeakMemory:
    """Samples the peak memory of a tree of processes: PSS, in which a shared page counts once, or RSS if there is no
    PSS."""

    def __init__(self, root: int) -> None:
        self.bytes = 0
        self._root = root
        self._peak_rss = 0

    def sample(self) -> None:
        """Sample the memory. Reading PSS walks the page tables and stops the process meanwhile, so it is read only at a
        new peak of RSS."""
        pids = tree(self._root)
        rss = sum(map(_rss_bytes, pids))
        if rss > self._peak_rss * 1.01:
            self._peak_rss = rss
            self.bytes = max(self.bytes, sum(map(_pss_bytes, pids)))


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _rss_bytes(pid)
