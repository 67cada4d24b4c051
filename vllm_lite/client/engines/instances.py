"""The engines and servers of this user. Each leaves a record in its run directory, by which ps finds and kill ends it.

A record may outlive its process, and the pid may belong to another one by then. So a process counts as the recorded one
only if its start time and its command line are the same. It is signalled through a pidfd that was opened before that
check, which no later process can get.
"""

import hashlib
import os
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from vllm_lite.client.engines.connection import RUN_DIR
from vllm_lite.client.engines.session import Session
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.stats import Stats
from vllm_lite.runtime.supervise import WORKER_NAME
from vllm_lite.transport.zmq import answers

RECORD = "instance.json"
ENDING = "ending"
"""A file of this name beside the record says that the engine is to end: no other takes its place then."""
ASK_S = 1.0
EXEC_S = 0.5
LAST_S = 5.0
"""Seconds that the kernel may take to end a killed process, or an engine to end after its server."""
_MAX_RECORD_BYTES = 1 << 20


class Process(msgspec.Struct, frozen=True):
    """The identity of a process, which no other process with the same pid has."""

    pid: Annotated[int, Meta(ge=1)]
    start_ticks: int
    command: str
    """A digest of its command line, which may hold keys."""

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Identify the process that has this pid now. Raises OSError if there is none."""
        deadline_s = time.monotonic() + EXEC_S
        while not Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < deadline_s:
            time.sleep(0.001)  # Popen returns when the new program is sure to run, a moment before it has arguments
        return cls(pid, int(_stat(pid)[19]), _command(pid))

    def state(self) -> str | None:
        """The kernel's letter for its state; None if it is gone, even if another process has its pid."""
        try:
            fields = _stat(self.pid)
            same = int(fields[19]) == self.start_ticks and os.stat(f"/proc/{self.pid}").st_uid == os.getuid()
            return fields[0] if same and fields[0] not in "ZX" and _command(self.pid) == self.command else None
        except OSError:
            return None


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record in a run directory. `url` and `server` are set if there is an HTTP server. `engine` is the latest that
    `launcher` started; while that lives, one that died is being replaced."""

    model: str
    address: str
    started_s: float
    engine: Process
    ready: bool = False
    server: Process | None = None
    url: str | None = None
    launcher: Process | None = None

    @property
    def processes(self) -> list[Process]:
        return [self.engine] if self.server is None else [self.engine, self.server]

    @property
    def main(self) -> Process:
        """The process whose end ends the others: the server, or the engine if there is none any more."""
        return self.server if self.server is not None and self.server.state() is not None else self.engine


State = Literal["serving", "recovering", "starting", "not answering", "stopped", "stale"]


class WorkerProcess(NamedTuple):
    """A worker process of a running engine, and its memory; shared memory counts for each worker."""

    rank: int
    pid: int
    memory_bytes: int


class Instance(NamedTuple):
    """A record, and the state in which its processes were found."""

    folder: Path
    record: InstanceRecord
    state: State
    memory_bytes: int
    stats: Stats | None
    workers: tuple[WorkerProcess, ...] = ()
    """By rank. A worker is there once its process has begun to run."""


def write(run_dir: str, record: InstanceRecord) -> None:
    """Write or replace the record in a run directory. A missing directory or a full disk is ignored."""
    with suppress(OSError):
        path = Path(run_dir) / RECORD
        draft = path.with_suffix(f".{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
        draft.replace(path)


def is_ending(run_dir: str) -> bool:
    """Whether end() was called for the engine in this run directory, or has removed it already."""
    return (Path(run_dir) / ENDING).exists() or not Path(run_dir).is_dir()  # in this order: clean() moves both at once


def find() -> list[Instance]:
    """Find all instances of this user below TMPDIR, the oldest first, and ask each for its state."""
    found = []
    try:
        root = tempfile.gettempdir()
    except FileNotFoundError:  # it cannot be written, and engines may run there nevertheless
        root = os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - nothing is written there
    for folder in sorted(Path(root).glob(RUN_DIR + "*")):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found.append((folder, _read(folder)))
    found.sort(key=lambda item: item[1].started_s)
    sizes = _memory()
    with ThreadPoolExecutor(max(1, min(16, len(found)))) as threads:
        return list(threads.map(lambda item: _look(item[0], item[1], sizes), found))


def wanted(instances: Sequence[Instance], target: str) -> list[Instance]:
    """Select the instances that `target` names: a pid, "all", a model's name, or the name of a run directory."""
    if target == "all":
        return list(instances)
    found = []
    for instance in instances:
        record = instance.record
        if target in (record.model, instance.folder.name, *(str(process.pid) for process in record.processes)):
            found.append(instance)
    return found


def clean(instance: Instance) -> None:
    """Remove the files of a dead instance: its run directory, and its socket if that is elsewhere."""
    address, doomed = instance.record.address, instance.folder.with_name(f".{instance.folder.name}")
    try:
        instance.folder.rename(doomed)
    except OSError:
        doomed = instance.folder
    shutil.rmtree(doomed, ignore_errors=True)
    if address.startswith("ipc://") and not answers(address):
        with suppress(OSError):
            path = Path(address.removeprefix("ipc://"))
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()


Ending = Literal["ended", "killed", "still running", "was gone"]


def end(instance: Instance, timeout_s: float, *, force: bool) -> Ending:
    """Send SIGTERM, wait at most `timeout_s`, then send SIGKILL if `force`; only to processes that are verified.

    An engine that ends so is not replaced.
    """
    with suppress(OSError):
        (instance.folder / ENDING).touch(0o600)
    with suppress(OSError, msgspec.MsgspecError):  # from here on it changes no more: it may have, since it was found
        instance = instance._replace(record=_read(instance.folder))
    ending = _end(instance.record.main, timeout_s, force=force)
    if ending != "still running":
        deadline_s = time.monotonic() + LAST_S
        while instance.record.engine.state() is not None and time.monotonic() < deadline_s:
            time.sleep(0.02)  # the engine ends by itself after its server
        if instance.record.engine.state() is not None and force:
            _end(instance.record.engine, LAST_S, force=True)
        if instance.record.engine.state() is None:
            clean(instance)
    return ending


def _end(process: Process, timeout_s: float, *, force: bool) -> Ending:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return "was gone"
    try:
        if process.state() is None:
            return "was gone"
        watch = select.poll()
        watch.register(descriptor, select.POLLIN)
        signal.pidfd_send_signal(descriptor, signal.SIGCONT)  # a stopped process takes no SIGTERM
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if watch.poll(1000 * timeout_s):
            return "ended"
        if not force:
            return "still running"
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return "killed" if watch.poll(1000 * LAST_S) else "still running"
    except ProcessLookupError:  # it ended between check and signal
        return "ended"
    finally:
        os.close(descriptor)


def _read(folder: Path) -> InstanceRecord:
    with (folder / RECORD).open("rb") as file:
        return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=InstanceRecord)


def _look(folder: Path, record: InstanceRecord, sizes: dict[int, tuple[int, int]]) -> Instance:
    letters = [process.state() for process in record.processes]
    if not any(letters):
        is_replaced = record.launcher is not None and record.launcher.state() is not None
        return Instance(folder, record, "starting" if is_replaced else "stale", 0, None)
    size = _tree_bytes(record.main.pid, sizes)
    workers = () if letters[0] is None else _workers(record.engine.pid, sizes)
    if "T" in letters:
        return Instance(folder, record, "stopped", size, None, workers)
    stats = _ask(record.address)
    state: State = "not answering" if record.ready else "starting"
    if stats is not None:
        state = "recovering" if stats.recovering else "serving"
    return Instance(folder, record, state, size, stats, workers)


def _ask(address: str) -> Stats | None:
    with suppress(VllmLiteError), closing(Session.connect(address, timeout_s=ASK_S, recovery_timeout_s=0)) as session:
        return session.stats(ASK_S)
    return None


# ---- /proc


def _stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat from the third on, which is the state."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _command(pid: int) -> str:
    return hashlib.blake2b(Path(f"/proc/{pid}/cmdline").read_bytes(), digest_size=16).hexdigest()


def _memory() -> dict[int, tuple[int, int]]:
    """Map each pid to its parent and its bytes in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = _stat(int(entry.name))
                found[int(entry.name)] = int(fields[1]), int(fields[21]) * page
    return found


def _workers(engine: int, sizes: dict[int, tuple[int, int]]) -> tuple[WorkerProcess, ...]:
    """The engine's children that have a worker's name, which each gives itself (worker/process.py)."""
    found = []
    for pid, (parent, num_bytes) in sizes.items():
        if parent == engine:
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
                prefix, rank = name[: len(WORKER_NAME)], name[len(WORKER_NAME) :]
                if prefix == WORKER_NAME and rank.isdecimal():
                    found.append(WorkerProcess(int(rank), pid, num_bytes))
    return tuple(sorted(found))


def _tree_bytes(root: int, sizes: dict[int, tuple[int, int]]) -> int:
    """Sum the memory of a process and all its descendants."""
    tree, grows = {root}, True
    while grows:
        more = {pid for pid, (parent, _) in sizes.items() if parent in tree} - tree
        tree, grows = tree | more, bool(more)
    return sum(sizes[pid][1] for pid in tree if pid in sizes)
