"""EngineSupervisor: keeps an engine running at one address.

An engine that dies or hangs is replaced by its next life, with the same address, keys and settings, until that fails,
happens too often, or is no longer wanted.

A thread watches the engine's process and pings the engine. Clients send their unfinished requests to the new engine.
"""

import os
import signal
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from vllm_lite import transport
from vllm_lite.client.engines import orphans
from vllm_lite.client.engines.engine_probe import EngineProbe
from vllm_lite.process_settings import EngineSettings
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.restarts import WINDOW_S, RestartLimit
from vllm_lite.runtime.supervise import Child
from vllm_lite.runtime.wakeup import Wakeup

STOPPED, BAD_INPUT, GAVE_UP = (f"exit status {status}" for status in (0, 2, 3))
"""Ends after which the engine is not replaced: it was stopped, it cannot start, or it has given up."""
JOIN_S = 2.0
_IDLE_S = 60.0
EARLY_ENTRIES = {"vllm_lite.engine.process": "vllm_lite.engine.process_early"}
"""Entry points of the engine that start its one worker before they import what they need."""

logger = log.get(__name__)


class Owner(Protocol):
    """The launcher of the engine. All calls but the first come from the supervisor's thread."""

    def on_life(self, pid: int, *, is_ready: bool) -> None:
        """Called when a life of the engine was started, and when it is ready to serve."""

    def may_restart(self) -> bool:
        """Whether to replace the engine; called when it has died, and when the next life was started."""

    def on_end(self, reason: str) -> None:
        """Called once, when the engine has ended and is not replaced."""


class _End(NamedTuple):
    """End of a life: the exit of its process (`status`), and the reason as far as it is known (`cause`)."""

    status: str
    cause: str


class EngineSupervisor:
    """Starts an engine at once. Before serves() is called, a failed start is not repeated."""

    def __init__(self, module: str, settings: EngineSettings, owner: Owner) -> None:
        """`module` is the entry point of the engine's process. Raises OSError if no process can be started."""
        self._module, self._settings, self._owner = module, settings, owner
        self._limit = RestartLimit(settings.config.max_restarts)
        self._wakeup = Wakeup()
        self._serves = False
        self._ended: str | None = None
        self._lock = threading.Lock()  # for the next two attributes
        self._closing = False
        self._child = self._spawn()
        owner.on_life(self._child.pid, is_ready=False)
        self._thread = threading.Thread(target=self._run, name="engine supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Pid of the engine's current life."""
        return self._child.pid

    @property
    def ended(self) -> str | None:
        """None while the engine runs or is being replaced, else its final end: "killed by SIGKILL"."""
        return self._ended

    def serves(self) -> None:
        """End the first start: from now on the engine is replaced when it dies."""
        self._serves = True
        self._wakeup.set()

    def stop(self, grace_s: float) -> None:
        """End the engine's current life, and start no other. May be called repeatedly."""
        with self._lock:
            self._closing = True
            child = self._child
        child.stop(grace_s)
        self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    # ---- the supervisor's own thread

    def _run(self) -> None:
        reason = "its supervisor failed"
        try:
            while True:
                end = self._watch()
                self._bury()
                final = self._replace(end)
                if final is not None:
                    reason = final
                    return
        except Exception as error:
            logger.exception("the supervisor of the engine failed")
            reason = f"its supervisor failed: {error!r}"
            self._child.stop(0.0)
        finally:
            self._ended = reason
            self._wakeup.close()
            self._owner.on_end(reason)

    def _watch(self) -> _End:
        """Wait until the current life has ended; kill it if it hangs."""
        config, began_s = self._settings.config, time.monotonic()
        while (status := self._child.exited()) is None and not self._serves:
            self._await(_IDLE_S)
        if status is not None:
            return _End(status, status)
        start_s = config.heartbeat_timeout_s if self._settings.life == 1 else config.ready_timeout_s
        hung, was_ready, now_s = None, False, time.monotonic()
        probe = EngineProbe(self._settings.address, start_s, config.heartbeat_timeout_s, now_s)
        with closing(probe):
            while (status := self._child.exited()) is None:
                if not probe.look(time.monotonic(), is_stopped=self._child.is_stopped()) and hung is None:
                    hung = self._kill_hung(probe.patience_s)
                if probe.is_ready and not was_ready:
                    was_ready = True
                    self._log_ready(time.monotonic() - began_s)
                self._await(probe.every_s, probe)
            probe.read_last()
        return _End(status, hung or probe.reason or status)

    def _await(self, timeout_s: float, *others: EngineProbe) -> None:
        """Wait for the end of the child, for serves(), or for a message to `others`."""
        if self._child.exited() is None:
            transport.wait(timeout_s, self._wakeup, *others)
        self._wakeup.clear()

    def _kill_hung(self, silent_s: float) -> str | None:
        """Kill a hung engine. Returns the reason, or None if the engine is a thread, which cannot be killed."""
        if self._settings.config.single_process:
            return None
        logger.warning("the engine (pid %d) has not answered for %g s; it is killed", self._child.pid, silent_s)
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGKILL)
        return f"it did not answer for {silent_s:g} s"

    def _bury(self) -> None:
        """Wait until the workers of a dead engine are gone, since the next ones measure the free memory of a GPU."""
        if self._settings.config.single_process:
            return
        left = orphans.end_children_of(self._child.pid)
        if left:
            logger.warning("%d workers of the dead engine (pid %d) still exist", left, self._child.pid)
        for kind in ("workers*", "group-*"):
            for path in Path(self._settings.run_dir).glob(kind):
                supervise.remove_dir(str(path)) if path.is_dir() else path.unlink(missing_ok=True)

    def _replace(self, end: _End) -> str | None:
        """Start the next life. Returns None, or the reason why it was not started."""
        restarted_for = self._limit.causes
        if not self._serves or not self._owner.may_restart() or end.status in (STOPPED, GAVE_UP):
            return end.cause
        if end.status == BAD_INPUT and restarted_for:
            return f"it cannot be started again: {end.cause}; it was restarted because it ended: {restarted_for}"
        if not self._limit.allows(end.cause, time.monotonic()):
            return self._limit.causes
        self._settings = msgspec.structs.replace(self._settings, life=self._settings.life + 1)
        dead = self._child.pid
        with self._lock:
            if self._closing:
                return end.cause
            try:
                self._child = self._spawn()
            except OSError as error:
                return f"it cannot be started again: {error}; it was restarted because it ended: {end.cause}"
        logger.warning(
            "the engine (pid %d) ended: %s; life %d of it starts (pid %d), at most %d in %g s do",
            *(dead, end.cause, self._settings.life, self._child.pid, self._settings.config.max_restarts, WINDOW_S),
        )
        self._owner.on_life(self._child.pid, is_ready=False)
        if not self._owner.may_restart():
            self._child.stop(0.0)
        return None

    def _log_ready(self, took_s: float) -> None:
        if self._settings.life > 1:
            logger.warning("life %d of the engine serves after %.1f s", self._settings.life, took_s)
            self._owner.on_life(self._child.pid, is_ready=True)

    def _spawn(self) -> Child:
        config = self._settings.config
        has_one_here = config.tensor_parallel_size == 1 and config.distributed_executor_backend != "ray"
        entry = EARLY_ENTRIES.get(self._module) if has_one_here else None
        on_exit = lambda _: self._wakeup.set()  # noqa: E731
        in_thread = config.single_process
        return supervise.spawn(self._module, self._settings, "engine", on_exit, in_thread=in_thread, entry=entry)
