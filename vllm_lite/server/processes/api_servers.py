"""ApiServers: all API servers but the first, which owns them: starts them, restarts them when they die or hang, and
ends them with itself."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import EngineError
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.supervise import Child
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes.scoreboard import Scoreboard

MODULE = "vllm_lite.server.processes.http_server"
READY_S = 60.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""More than MAX_RESTARTS deaths in this time end all servers."""
LOOK_S = 0.02
WATCH_S = 1.0
"""Seconds between two checks of the servers' signs of life."""
AGAIN_S = 2.0
"""Seconds of grace for a sign of life after this process itself was stopped, as the others may have been stopped with
it."""
GRACE_S = 5.0
"""Seconds beyond shutdown_timeout before a server is killed."""

logger = log.get(__name__)


class ApiServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an API server's process. `engine` is resolved; `addresses` are those of all engines; `listener` and
    `scoreboard` are open file descriptors."""

    config: ServeConfig
    keys: Keys
    engine: ResolvedConfig
    addresses: tuple[str, ...]
    number: int
    listener: int
    scoreboard: int


class ApiServers:
    """Runs one child process for each of the settings, if there are any."""

    def __init__(
        self, settings: Sequence[ApiServerSettings], scoreboard: Scoreboard, listeners: Sequence[socket.socket] = ()
    ) -> None:
        """`listeners` are this process's copies of the children's sockets. They stay open when a server dies, so that
        new clients wait for its successor."""
        self.trouble: str | None = None
        """The reason why all servers must end, None while they need not."""
        self._settings = {each.number: each for each in settings}
        self._scoreboard = scoreboard
        self._listeners = listeners
        self._children: dict[int, Child] = {}
        self._ready_by_s: dict[int, float] = {}
        self.looked_s = self._stopped_until_s = 0.0
        self._exits: deque[tuple[int, str]] = deque()
        self._restarts: deque[float] = deque()
        self._stopping: list[threading.Thread] | None = None

    async def start(self) -> None:
        """Start all servers, and wait until each is alive. Raises EngineError."""
        for number in self._settings:
            self._spawn(number)
        deadline_s = time.monotonic() + READY_S
        for number in self._settings:
            while self._stopping is None and not self._scoreboard.alive_s(number):
                if self._exits:
                    raise EngineError("API server {} did not start: {}".format(*self._exits[0]))
                if time.monotonic() > deadline_s:
                    raise EngineError(f"API server {number} did not answer within {READY_S:g} s")
                await asyncio.sleep(LOOK_S)

    async def watch(self) -> None:
        """Until cancelled: kill a server that gives no sign of life for heartbeat_timeout_s, or does not start within
        READY_S; restart_ended() then restarts it."""
        self.looked_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            self.kill_hung(time.monotonic())

    def kill_hung(self, now_s: float) -> None:
        if now_s - self.looked_s > WATCH_S + AGAIN_S:  # this process was stopped (SIGSTOP)
            self._stopped_until_s = now_s + AGAIN_S
        self.looked_s = now_s
        for number, child in self._children.items():
            patience_s = self._settings[number].engine.heartbeat_timeout_s
            alive_s = self._scoreboard.alive_s(number)
            deadline_s = alive_s + patience_s if alive_s else self._ready_by_s[number]
            is_running = child.exited() is None and self._stopping is None
            if is_running and now_s > max(deadline_s, self._stopped_until_s):
                logger.warning("API server %d has not answered for %g s; it is killed", number, patience_s)
                os.kill(child.pid, signal.SIGKILL)

    def restart_ended(self) -> str | None:
        """Restart ended servers. Returns the reason why all must end, None while they need not."""
        while self._exits and self._stopping is None and self.trouble is None:
            number, reason = self._exits.popleft()
            now_s = time.monotonic()
            self._restarts.append(now_s)
            while now_s - self._restarts[0] > RESTART_WINDOW_S:
                self._restarts.popleft()
            if len(self._restarts) > MAX_RESTARTS:
                count, window = len(self._restarts), f"{RESTART_WINDOW_S:g} s"
                self.trouble = f"API servers ended {count} times in {window}, the last of them: {reason}"
                break
            logger.warning("API server %d ended (%s); it is started again", number, reason)
            self._spawn(number)
        return self.trouble

    def stop(self) -> None:
        """Ask all servers to end, each within its shutdown timeout."""
        if self._stopping is not None:
            return
        for listener in self._listeners:
            listener.close()
        self._stopping = [
            threading.Thread(target=child.stop, args=(self._settings[number].config.shutdown_timeout + GRACE_S,))
            for number, child in self._children.items()
        ]
        for thread in self._stopping:
            thread.start()

    def stop_now(self) -> None:
        """After stop(): ask all servers again, to end without waiting for their requests."""
        for child in self._children.values():
            if child.exited() is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    async def ended(self) -> None:
        """After stop(): wait until all servers have exited."""
        for thread in self._stopping or ():
            await asyncio.to_thread(thread.join)

    def _spawn(self, number: int) -> None:
        settings = self._settings[number]
        self._scoreboard.clear(number)
        self._ready_by_s[number] = time.monotonic() + READY_S
        on_exit = lambda reason: self._exits.append((number, reason))  # noqa: E731
        fds = (settings.listener, settings.scoreboard)
        self._children[number] = supervise.spawn(MODULE, settings, f"API server {number}", on_exit, fds=fds)
