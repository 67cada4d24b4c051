"""Child processes: started by Popen, watched by the parent, and watching their parent, so that none is left behind.

A child is `python -m MODULE`, never a fork or a re-run of the user's script. It gets its settings as msgpack over a
pipe that the parent keeps open: end of file means that the parent has died. Settings may be sent later than the child
is started, which imports its modules in the meantime (spawn_early). For a child that is stuck in native code, the
kernel is asked for a signal as well (PR_SET_PDEATHSIG). That signal is sent when the *thread* that started the child
ends, so the thread that starts a child is the one that waits for its end.
"""

import ctypes
import gc
import os
import shutil
import signal
import sys
import sysconfig
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TypeVar

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log
from vllm_lite.runtime.machine import has_folder
from vllm_lite.runtime.wakeup import SignalWakeup, Wakeup

S = TypeVar("S", bound=msgspec.Struct)

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
WORKER_NAME, STANDBY_NAME = "vl-worker ", "vl-standby "
"""Process names: WORKER_NAME and the rank for a worker, by which `vllm-lite ps` finds it; STANDBY_NAME before it loads
the model."""
_MAX_SETTINGS_BYTES = 1024 * 1024
_LENGTH_BYTES = 4
KILL_S = 5.0
"""Timeout for the end of a killed process."""
REMOVALS = 10
"""Number of attempts to remove a folder in which files are created at the same time."""

logger = log.get(__name__)


class Child(ABC):
    """A started engine or worker."""

    def __init__(self, name: str, on_exit: Callable[[str], None]) -> None:
        self.name = name
        self.pid = 0
        self._reason: str | None = None
        self._on_exit = on_exit

    def exited(self) -> str | None:
        """Return None while the child runs, else why it ended: "killed by SIGKILL", "exit status 1"."""
        return self._reason

    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP."""
        return False

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Ask the child to end, wait at most `grace_s`, then kill it. Returns when it has ended."""

    def kill(self) -> None:
        """Kill the child. Returns when it has ended."""
        self.stop(0.0)


class ChildProcess(Child):
    """A child process, made by spawn() or spawn_early(). It waits for its settings."""

    def __init__(self, module: str, name: str, fds: Sequence[int] = ()) -> None:
        super().__init__(name, lambda _reason: None)
        open_standard_files()
        self._fds = tuple(fds)
        self._settings: msgspec.Struct | None = None
        self._is_decided = threading.Event()
        """Set when it has got its settings, or will end without."""
        self._started = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, args=(module,), name=f"{name} watch", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def begin(self, settings: msgspec.Struct, on_exit: Callable[[str], None]) -> None:
        """Send the child its settings. To be called once."""
        self._settings, self._on_exit = settings, on_exit
        self._is_decided.set()

    def _live(self, module: str) -> None:
        try:
            read_end, write_end = os.pipe()
            try:
                process = Popen(
                    [sys.executable, "-P", "-m", module, str(read_end), str(os.getpid())],
                    pass_fds=(read_end, *self._fds),
                    env=_environment(),
                    cwd=None if has_folder() else "/",
                    stdin=DEVNULL,
                    stdout=2,  # so that a script's stdout has only what the script prints
                    process_group=0,  # Ctrl-C reaches the parent only, which ends its children in order
                )
            finally:
                os.close(read_end)
            self.pid = process.pid
        except BaseException as error:
            self._error = error
            self._started.set()
            return
        self._started.set()
        self._is_decided.wait()
        if self._settings is not None:
            payload = msgspec.msgpack.encode(self._settings)
            with suppress(BrokenPipeError), open(write_end, "wb", closefd=False) as pipe:  # it may have died already
                pipe.write(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
        code = process.wait()
        os.close(write_end)
        self._reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._ended.set()
        self._on_exit(self._reason)

    def is_stopped(self) -> bool:
        with suppress(OSError):  # it is gone
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
        return False

    def stop(self, grace_s: float) -> None:
        asked = ((signal.SIGTERM, grace_s),) if self._settings is not None else ()  # it holds nothing before
        self._signal(*asked, (signal.SIGKILL, KILL_S))

    def kill(self) -> None:
        self._signal((signal.SIGKILL, KILL_S))

    def _signal(self, *signals: tuple[signal.Signals, float]) -> None:
        """Send the signals one after the other, waiting the given seconds after each, until the process has ended."""
        self._is_decided.set()
        for number, patience_s in signals:
            if self._ended.is_set():
                return
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)  # a stopped process takes no SIGTERM
                os.kill(self.pid, number)
            self._ended.wait(patience_s)


class ChildThread(Child):
    """The same entry point in a thread of this process, for --single-process. stop() sets its wakeup."""

    def __init__(self, module: str, settings: msgspec.Struct, name: str, on_exit: Callable[[str], None]) -> None:
        super().__init__(name, on_exit)
        self.pid = os.getpid()
        self._stop = Wakeup()
        self._thread = threading.Thread(target=self._live, args=(module, settings), name=name, daemon=True)
        self._thread.start()

    def _live(self, module: str, settings: msgspec.Struct) -> None:
        code = 1
        try:
            code = import_module(module).main(settings, self._stop)
        except Exception:
            logger.exception("%s failed", self.name)
        self._reason = f"exit status {code}"
        self._on_exit(self._reason)

    def stop(self, grace_s: float) -> None:
        self._stop.set()
        self._thread.join(grace_s)
        if not self._thread.is_alive():
            self._stop.close()


def spawn(  # noqa: PLR0913 - the last three are for few
    module: str,
    settings: msgspec.Struct,
    name: str,
    on_exit: Callable[[str], None],
    *,
    in_thread: bool = False,
    fds: Sequence[int] = (),
    entry: str | None = None,
) -> Child:
    """Start `python -m module` with `settings`; `on_exit(reason)` is called on a separate thread when it ends.

    The child ends when this process does, however this process ends. `in_thread` runs it in a thread of this process
    instead. The child inherits the descriptors `fds` under the same numbers; without `fds`, a child started by
    spawn_early() may be used. `entry` is a module that is run in place of `module` and does the same.
    """
    if in_thread:
        return ChildThread(module, settings, name, on_exit)
    early = None if fds else _early.pop(module, None)
    child = early or ChildProcess(entry or module, name, fds)
    child.name = name
    child.begin(settings, on_exit)
    return child


_early: dict[str, ChildProcess] = {}
"""Children that wait for their settings, by the `module` for spawn()."""


def spawn_early(module: str, entry: str | None = None) -> None:
    """Start the process for the next spawn() of `module`: it imports its modules, and waits for settings.

    For a process that must import much before it knows the settings. `entry` is as in spawn(), which also reports a
    process that cannot be started.
    """
    with suppress(OSError):
        _early[module] = ChildProcess(entry or module, module)


def end_early() -> None:
    """Kill processes of spawn_early() that spawn() has not used."""
    while _early:
        _early.popitem()[1].stop(0.0)


def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """Stop children in parallel: it takes as long as the slowest. Returns when all have ended."""
    others = [threading.Thread(target=child.stop, args=(grace_s,), name=f"{child.name} stop") for child in children[1:]]
    for thread in others:
        thread.start()
    if children:
        children[0].stop(grace_s)
    for thread in others:
        thread.join()


def keep_from_collections() -> None:
    """Freeze the child's objects so far, so that the garbage collector skips them: they live as long as the process.
    Does nothing in a thread in place of a process, as frozen objects are never freed."""
    if threading.current_thread() is threading.main_thread():
        gc.freeze()


def run_child(
    main: Callable[[S, Wakeup], int],
    settings_type: type[S],
    *,
    graceful: bool = False,
    cleanup: Callable[[S], None] | None = None,
) -> None:
    """The body of a child's `if __name__ == "__main__"`: read the settings, watch the parent, run, exit.

    `main(settings, stop)` returns the exit status. If `graceful`, SIGTERM and SIGINT set `stop`, which `main` has to
    check; otherwise they end the process at once, even in native code. If the parent dies, `cleanup(settings)` runs and
    the process ends at once, even if graceful.
    """
    read_end, parent = int(sys.argv[1]), int(sys.argv[2])
    stop = SignalWakeup() if graceful else Wakeup()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, (lambda *_: stop.set()) if graceful else signal.SIG_DFL)
    of_death = signal.SIGHUP if graceful else signal.SIGTERM  # not SIGTERM, which asks for a graceful end
    if graceful:
        signal.signal(of_death, signal.SIG_IGN)  # until cleanup() has settings
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, of_death, 0, 0, 0)
    length = int.from_bytes(_read_exactly(read_end, _LENGTH_BYTES), "little")
    if length > _MAX_SETTINGS_BYTES:
        raise SystemExit(f"settings of {length} bytes are too long")
    settings = msgspec.msgpack.decode(_read_exactly(read_end, length), type=settings_type)

    def end(*_: object) -> None:
        """The parent is gone."""
        try:
            if cleanup is not None:
                cleanup(settings)
        finally:
            os._exit(1)

    def watch_parent() -> None:
        os.read(read_end, 1)  # nothing is ever written: it returns at the end of file
        end()

    if graceful:
        signal.signal(of_death, end)
    threading.Thread(target=watch_parent, name="parent watch", daemon=True).start()
    if os.getppid() != parent:  # it died before prctl took effect
        end()
    sys.exit(main(settings, stop))


def name_process(name: str) -> None:
    """Set the name shown by top and /proc/PID/comm, at most 15 bytes. Only the main thread's name is the process's."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def open_standard_files() -> None:
    """Open /dev/null as stdin, stdout and stderr if these are closed. Otherwise a socket or pipe would get their
    numbers, receive printed text, or be replaced in a child."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - stays open


def make_dir(prefix: str = "vl-") -> str:
    """Make a run directory of mode 0700 in the folder for temporary files. Raises ConfigError if it cannot be made, for
    example on a read-only file system."""
    import tempfile  # children, which start with this module, make none

    try:
        return tempfile.mkdtemp(prefix=prefix)
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written"
        raise ConfigError(f"no folder for the engine's sockets can be made: {error.strerror}; {advice}") from error


def remove_dir(path: str) -> None:
    """Remove a run directory and the sockets in it. Another process may remove it at the same time, or create a socket
    in it, as an engine that is starting when its parent dies."""
    for _ in range(REMOVALS):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return


def _environment() -> dict[str, str]:
    """The parent's environment, extended so that the child finds a package imported from a checkout."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    if root not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:  # the parent died in the middle
            os._exit(1)
        data += piece
    return data
