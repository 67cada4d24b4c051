"""Checks of chaos.py's streams and processes, and counts of the promises that were broken.

The Ledger judges every stream by the answer of the quiet engine. Watch reads /proc: memory and descriptors of server
and engine, and, in the end, what is left of all that was ever started.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.acceptance.chaos_client import Record
from tests.acceptance.chaos_specs import Answer

CONVICTED = "killed"
"""A word of the error with which a request ends that was in flight at each death of a worker."""
LOGPROB_TOLERANCE = 5e-3
MAX_EXAMPLES = 20
SHARED = Path("/dev/shm")
MAX_MORE_FDS = 32
MAX_GROWTH_MIB = 256.0
MIN_AGE_S = 5.0
"""Minimum age of a process that is measured; younger ones grow because they start."""
SETTLED = ("read", "slow")
"""Intents whose streams must end as the reference does."""


def compare(expected: Sequence[int], got: Sequence[int], *, prefix: bool = False) -> str | None:
    """Name the error of `got`: "missing", "repeated" or "different"; None if it is right.

    `prefix`: any part from the beginning is right.
    """
    if list(got) == list(expected[: len(got)]):
        return None if prefix or len(got) == len(expected) else "missing"
    if list(expected) == list(got[: len(expected)]):
        return "repeated"
    at = next(i for i, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other)
    tail = list(got[at:])
    if any(tail == list(expected[at + skipped : at + skipped + len(tail)]) for skipped in range(1, len(expected) - at)):
        return "missing"
    for again in range(1, at + 1):
        if tail[:again] == list(got[at - again : at]) and tail[again:][:4] == list(expected[at : at + 4]):
            return "repeated"
    return "different"


class Ledger:
    """Judges the streams. `broken`: counts of broken promises, which must be 0. `streams`: counts of streams by their
    ends."""

    def __init__(self, expected: dict[str, Answer]) -> None:
        self.expected = expected
        self.open: dict[str, Record] = {}
        self.forks: list[Record] = []
        """Forks, which are judged once their reference has been computed."""
        self.streams: Counter[str] = Counter()
        self.broken: Counter[str] = Counter(dict.fromkeys(("lost", "repeated", "missing", "different"), 0))
        self.examples: list[str] = []

    def take(self, record: Record) -> None:
        if not record.ended:
            self.open[record.stream] = record
            return
        if self.open.pop(record.stream, None) is None:
            self.breaks("repeated", record, "it ended twice, or was never begun")
            return
        self.streams[record.way] += 1
        for fault in record.faults:
            self.breaks("repeated" if "behind" in fault or "then shown" in fault else "missing", record, fault)
        if record.error is not None:
            self._judge_error(record, record.error)
        elif record.fork is not None:
            self.forks.append(record)
        else:
            self.judge(record, self.expected[record.key])

    def vanished(self, client: str) -> None:
        """Forget the streams of a killed client."""
        for stream in [stream for stream in self.open if stream.startswith(f"{client}-")]:
            del self.open[stream]
            self.streams["vanished"] += 1

    def lose_open(self) -> None:
        """Count streams that have not ended in time as lost."""
        for record in self.open.values():
            self.breaks("lost", record, "it has no end")
        self.open.clear()

    def judge(self, record: Record, expected: Answer) -> None:
        answer = record.answer or Answer([], [])
        part = record.intent not in SETTLED
        if len(answer.tokens) != len(expected.tokens) and not part:
            self.breaks("missing", record, f"{len(answer.tokens)} of {len(expected.tokens)} samples")
        for index, (tokens, got) in enumerate(zip(expected.tokens, answer.tokens, strict=False)):
            broken = compare(tokens, got, prefix=part)
            if broken is not None:
                self.breaks(broken, record, f"sample {index}: {got} instead of {tokens}")
        if part:
            return
        if record.way != "raw" and answer.reasons != expected.reasons:  # the raw client prints none
            self.breaks("different", record, f"ended by {answer.reasons} instead of {expected.reasons}")
        if record.way == "python":
            self._judge_logprobs(record, answer, expected)

    def breaks(self, what: str, record: Record, how: str) -> None:
        self.broken[what] += 1
        if len(self.examples) < MAX_EXAMPLES:
            fork = "" if record.fork is None else f", {record.fork}"
            self.examples.append(f"{what}: {record.stream} ({record.way}, {record.intent}, {record.key}{fork}): {how}")

    def _judge_error(self, record: Record, error: str) -> None:
        if record.intent == "deadline" and "deadline" in error:
            self.streams["past deadline"] += 1
            self.judge(record, self.expected[record.key])  # it must have got a prefix
        elif CONVICTED in error and "request" in error:
            self.streams["convicted"] += 1
        else:
            self.breaks("lost", record, error)

    def _judge_logprobs(self, record: Record, answer: Answer, expected: Answer) -> None:
        pairs = list(zip(answer.logprobs or [], expected.logprobs or [], strict=False))
        if expected.prompt_logprobs is not None or answer.prompt_logprobs is not None:
            pairs.append((answer.prompt_logprobs or [], expected.prompt_logprobs or []))
        for got, wanted in pairs:
            if len(got) != len(wanted):
                self.breaks("repeated" if len(got) > len(wanted) else "missing", record, f"{len(got)} logprobs")
            elif any(abs(one - other) > LOGPROB_TOLERANCE for one, other in zip(got, wanted, strict=True)):
                self.breaks("different", record, f"logprobs {got} instead of {wanted}")


class Process(msgspec.Struct, frozen=True):
    """A running process of the server: `role` is "server", "engine", "worker" or "other"."""

    pid: int
    role: str
    name: str


def processes(root: int) -> list[Process]:
    """`root` and its running descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (state := _state(int(entry.name))) is not None and state[0] not in "ZX":
            children.setdefault(state[1], []).append(int(entry.name))
    pids = [root] if running(root) else []
    for pid in pids:
        pids += sorted(children.get(pid, []))
    return [Process(pid, _role(pid, root), _read(pid, "comm").strip()) for pid in pids]


def running(pid: int) -> bool:
    state = _state(pid)
    return state is not None and state[0] not in "ZX"


def began_at(pid: int) -> int:
    words = _read(pid, "stat").rpartition(")")[2].split()
    return int(words[19]) if len(words) > 19 else 0


def _role(pid: int, root: int) -> str:
    if pid == root:
        return "server"
    name, command = _read(pid, "comm"), _read(pid, "cmdline").replace("\0", " ")
    if name.startswith("vl-worker "):
        return "worker"
    if "engine" in command.partition(" -m ")[2]:
        return "engine"
    return "worker" if "worker" in command.partition(" -m ")[2] else "other"


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, int] | None:
    words = _read(pid, "stat").rpartition(")")[2].split()
    return (words[0], int(words[1])) if len(words) > 1 else None


class Seen(NamedTuple):
    """Start time of a process in the kernel's ticks, which distinguishes it from a later one with its pid, and the time
    at which it was first seen."""

    began: int
    first_s: float
    name: str


class Use(msgspec.Struct):
    """Resources of a process: at the first measurement, at the maximum, and now."""

    role: str
    first: tuple[float, int]
    most: tuple[float, int]
    last: tuple[float, int]


class Watch:
    """Follows the processes below a server."""

    def __init__(self, root: int, run_folder: Path) -> None:
        self.root = root
        self.run_folder = run_folder
        self.seen: dict[int, Seen] = {}
        self.uses: dict[int, Use] = {}
        self.shared_before = set(os.listdir(SHARED))

    def look(self) -> list[Process]:
        now_s, found = time.monotonic(), processes(self.root)
        for process in found:
            began = began_at(process.pid)
            known = self.seen.get(process.pid)
            if known is None or known.began != began:
                known = self.seen[process.pid] = Seen(began, now_s, process.name)
                self.uses.pop(process.pid, None)
            if process.role in ("server", "engine") and now_s - known.first_s > MIN_AGE_S:
                use = _use(process.pid)
                if use is not None:
                    self._note(process, use)
        return found

    def _note(self, process: Process, use: tuple[float, int]) -> None:
        known = self.uses.setdefault(process.pid, Use(process.role, use, use, use))
        known.most = (max(known.most[0], use[0]), max(known.most[1], use[1]))
        known.last = use

    def growth(self) -> list[str]:
        """One sentence for every process that uses far more than at first. Call it when the server is idle."""
        return [
            sentence
            for pid, use in self.uses.items()
            for sentence in grown(f"{use.role} (pid {pid})", use.first, use.last)
        ]

    def left(self) -> list[str]:
        """Name the processes, files and shared memory that the server left when it ended."""
        found = [
            f"process {pid} ({seen.name})"
            for pid, seen in self.seen.items()
            if running(pid) and began_at(pid) == seen.began
        ]
        found += [f"file {path}" for path in self.run_folder.rglob("*") if path.exists()]
        mine = sorted(set(os.listdir(SHARED)) - self.shared_before)
        return found + [f"shared memory {name}" for name in mine if "vl" in name or "vllm" in name]


def grown(who: str, first: tuple[float, int], last: tuple[float, int]) -> Iterable[str]:
    """(MiB, descriptors) at first and at last."""
    if last[0] - first[0] > MAX_GROWTH_MIB:
        yield f"{who} grew from {first[0]:.0f} to {last[0]:.0f} MiB"
    if last[1] - first[1] > MAX_MORE_FDS:
        yield f"{who} had {first[1]} open files and then {last[1]}"


def _use(pid: int) -> tuple[float, int] | None:
    """MiB in memory, and open files; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, IndexError):
        return None
