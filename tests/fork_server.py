"""Processes of the package that are forked from one that has imported its modules, in place of new interpreters:
imports are most of what a server, an engine and a worker cost until they are ready.

`Popen` is subprocess.Popen whose child is such a fork, if it is `python -m` one of MODULES. Each child is a child of
the process that asks for it, as always: it is cloned with CLONE_PARENT by a fork server that is a child of that
process. So a process that may start others is forked together with a fork server of its own, which has no threads,
sockets and settings. Of what a child shows (parent, group, command line in /proc, files, exit status) nothing is
unusual. It ends as Python does, except that the interpreter is not taken apart.

A test of how processes start or what their users see needs new interpreters: `Server(fresh=True)`. Processes that fail
on purpose always are (killed_engine.py, failing_worker.py and others of tests/e2e), and those for which a variable
differs that may have been read before a fork.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from tests.deadlines import scaled

ROOT = str(Path(__file__).resolve().parent.parent)
LEAVES = "vllm_lite.worker.process", "tests.e2e.light_worker"
"""Modules whose processes do not start others."""
MODULES = (
    "vllm_lite",
    "vllm_lite.engine.process",
    "vllm_lite.engine.process_early",
    "vllm_lite.server.processes.child_server",
    "vllm_lite.server.processes.http_server",
    "tests.e2e.light",
    *LEAVES,
)
IMPORTED_LATER = "vllm_lite.worker.worker", "vllm_lite.tools.cli.serve", "vllm_lite.server.processes.serve"
"""Modules that those import once they run."""
READ_BEFORE = (
    *("PYTHON", "LD_", "LANG", "LC_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_"),
    *("DNNL_", "ONEDNN_", "ATEN_", "TORCH_", "PYTORCH_", "CUDA_", "VLLM_LITE_ISA"),
)
"""Beginnings of the names of variables that the interpreter, a library or an import reads."""
NAME = "fork server"
ANSWER_S = scaled(60.0)
ROOM = 8192
"""Bytes for a command line in /proc."""
FIRST_FD = 500
"""Descriptors of this module are from here on: lower ones are a child's own."""
MAX_BYTES, MAX_FDS = 1 << 17, 64
SYS_CLONE, CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 56, 0x8000, 0x200000, 0x1000000
PR_SET_NAME, PR_GET_TID_ADDRESS = 15, 40

_lock = threading.Lock()
_wire: socket.socket | None = None
"""The connection to this process's fork server."""
_environment: dict[str, str] = {}
"""The environment in which that imported."""


class Start(NamedTuple):
    """A child to be. The descriptors that are sent along get the numbers `fds`."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    is_group: bool
    fds: list[int]

    @property
    def module(self) -> str | None:
        """The module; None if the command cannot be forked."""
        python, *words = self.words
        words = words[1:] if words[:1] == ["-P"] else words
        return words[1] if python == sys.executable and words[:1] == ["-m"] and words[1] in MODULES else None

    @property
    def is_imported(self) -> bool:
        """Whether its imports would be the same as the fork server's."""
        changed = {name for name, _ in self.env.items() ^ _environment.items()} - {"PYTHONPATH"}
        paths = self.env.get("PYTHONPATH", ROOT).split(os.pathsep)
        return set(paths) == {ROOT} and not any(name.startswith(READ_BEFORE) for name in changed)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A child that is forked, if it can be. subprocess has no public place for another way to start it."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        asked = signature(execute).bind(*given, **named).arguments
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        sources = [number if end == -1 else end for number, end in enumerate(ends)]
        extra = sorted(asked["pass_fds"])
        start = Start(
            list(map(str, asked["args"])),
            dict(os.environ if asked["env"] is None else asked["env"]),
            str(asked["cwd"] or Path.cwd()),
            asked["process_group"] == 0,
            [0, 1, 2, *extra],
        )
        is_plain = not any(asked[name] for name in ("executable", "preexec_fn", "shell", "start_new_session"))
        is_plain = is_plain and not any(map(os.isatty, sources))
        pid = None
        if _wire is not None and is_plain and start.module is not None and start.is_imported:
            pid = _ask(_wire, start, [*sources, *extra])
        if pid is None:
            execute(*given, **named)
            return
        self.pid = pid
        self._child_created = True
        pipes = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _ask(wire: socket.socket, start: Start, fds: list[int]) -> int | None:
    """Request a child and return its pid. The child answers once it is set up; None if the fork server has ended."""
    global _wire
    with _lock, suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(wire, [json.dumps(start).encode()], fds)
        try:
            if answer := wire.recv(MAX_BYTES):
                return int(answer)
        except TimeoutError:
            _wire = None  # the next child is a new interpreter: it must not get this answer
            wire.close()
            raise
    return None


def begin() -> None:
    """Start this process's fork server if there is none. Only the main thread can: the kernel would tell the children
    of that thread's end as of their parent's (PR_SET_PDEATHSIG)."""
    global _wire
    in_main = threading.current_thread() is threading.main_thread()
    if _wire is not None or not in_main or platform.machine() != "x86_64":
        return
    _environment.update(os.environ)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(ANSWER_S)
    unread, output = os.pipe()  # not /dev/null: sys.stdout of a fork would seek in the file that replaces it
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.fork_server", str(theirs.fileno()), "-" * ROOM],
            env={**os.environ, "PYTHONPATH": ROOT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            pass_fds=[theirs.fileno()],
        )
    os.close(unread)
    os.close(output)
    _wire = ours
    atexit.register(_end, server)  # which would end by itself, a moment later


def _end(server: "subprocess.Popen[bytes]") -> None:
    if _wire is not None:
        _wire.close()
    server.kill()
    server.wait()


# ---- in the fork server and its forks


def main() -> None:
    """Import the modules, and fork a child for each request until no process can send any more."""
    asking = socket.socket(fileno=_moved(int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _environment.update(os.environ)
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # as in a worker, until OpenMP has read it
    import_module("vllm_lite.runtime.torch_import").put_off()
    for name in (*MODULES, *IMPORTED_LATER):
        import_module(name)
    os.environ.clear()
    os.environ.update(_environment)
    if len(os.listdir("/proc/self/task")) > 1:
        return  # as OMP_NUM_THREADS has it; no fork would have the others
    gc.collect()
    gc.freeze()
    start, fds, asking = _forks(asking)
    _become(start, fds)
    with asking, suppress(BrokenPipeError):  # the requesting process may have died; the child notices it as usual
        asking.send(str(os.getpid()).encode())
    status = _run(start)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _forks(asking: socket.socket) -> tuple[Start, list[int], socket.socket]:
    """Returns in each child, with the socket on which it is to answer. The fork servers stay in here."""
    global _wire
    while True:
        data, fds, _, _ = socket.recv_fds(asking, MAX_BYTES, MAX_FDS)
        if not data:
            os._exit(0)
        if _clone() != 0:
            for fd in fds:
                os.close(fd)
            continue
        start = Start(*json.loads(data))
        if start.is_group:
            os.setpgid(0, 0)
        if start.module in LEAVES:
            return start, fds, asking
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() != 0:
            theirs.close()
            _wire = socket.socket(fileno=_moved(ours.detach()))
            _wire.settimeout(ANSWER_S)
            return start, fds, asking
        _name(NAME)
        for fd in (*fds, ours.detach(), asking.detach()):
            os.close(fd)
        asking = socket.socket(fileno=_moved(theirs.detach()))


def _clone() -> int:
    """Fork a child of this process's parent, which glibc's fork() cannot do. Keeps the thread's id where the kernel
    clears it at the end."""
    python, libc, place = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_GET_TID_ADDRESS")
    python.PyOS_BeforeFork()
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD
    pid = int(libc.syscall(SYS_CLONE, flags, None, None, place, None))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _become(start: Start, fds: list[int]) -> None:
    """Take over the environment, files and arguments of a new program."""
    _name(Path(sys.executable).name)
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.env)
    tempfile.tempdir = None
    for fd, number in zip([_moved(fd) for fd in fds], start.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for number, (name, mode) in enumerate((("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb"))):
        old = getattr(sys, name)
        new = open(number, mode, 0 if old.write_through else -1, closefd=False)  # noqa: SIM115 - stays open
        how = {"line_buffering": old.line_buffering, "write_through": old.write_through}
        text = io.TextIOWrapper(new, old.encoding, old.errors, **how)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = start.words.index("-m")
    sys.orig_argv[:], sys.argv[:] = start.words, start.words[options + 1 :]
    if "-P" not in start.words[:options] and start.cwd not in sys.path:
        sys.path.insert(0, start.cwd)
    shown = b"\0".join(word.encode() for word in start.words)
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memmove(first, shown[: end - first - 1].ljust(end - first, b"\0"), end - first)


def _run(start: Start) -> int:
    """Run it as `python -m` does, with children that are forked as well. Returns the exit status."""
    assert start.module is not None
    if _wire is not None:
        import_module("vllm_lite.runtime.supervise").Popen = Popen  # type: ignore[attr-defined]
    spec = find_spec(start.module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{start.module}.__main__")
    assert spec is not None
    sys.modules["__main__"] = main = module_from_spec(spec)
    main.__name__, sys.argv[0] = "__main__", str(spec.origin)
    try:
        exec(spec.loader.get_code(spec.name), vars(main))  # type: ignore[union-attr]
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0


def _moved(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    finally:
        os.close(fd)


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    import_module("tests.fork_server").main()  # not as __main__, which is to be the module that a fork runs
