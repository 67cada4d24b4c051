"""The API servers beside the first one, which owns them: started, watched, started again when they die or hang, ended
with it."""

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import EngineError
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.supervise import Child
from vllm_lite.server.config import Keys, ServeConfig

MODULE = "vllm_lite.server.processes.api_server"
READY_S = 60.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""A server that dies more often than MAX_RESTARTS times in this time ends the family."""
LOOK_S = 0.02
WATCH_S = 1.0
"""Between two questions to one that answers."""
AGAIN_S = 2.0
"""For a last answer of one that is to be killed: this process itself may have been stopped meanwhile."""
GRACE_S = 5.0
"""Beyond the time that requests have to end."""

logger = log.get(__name__)


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an API server is started with. `engine` is resolved; `listener` is an open descriptor."""

    config: ServeConfig
    keys: Keys
    engine: ResolvedConfig
    address: str
    run_dir: str
    number: int
    listener: int


class Family:
    """Of as many servers as there are settings; without any it has nothing to do."""

    def __init__(
        self, settings: Sequence[ApiSettings] = (), close_listeners: Callable[[], None] = lambda: None
    ) -> None:
        """`close_listeners` closes this process's own copies of their sockets, which outlive a server that dies, so
        that clients who come meanwhile wait for the next."""
        self._settings = {each.number: each for each in settings}
        self._close_listeners = close_listeners
        self._children: dict[int, Child] = {}
        self._ready_by_s: dict[int, float] = {}
        self._exits: deque[tuple[int, str]] = deque()
        self._restarts: deque[float] = deque()
        self._stopping: list[threading.Thread] | None = None
        self._trouble: str | None = None

    async def start(self, is_up: Callable[[int, float], Awaitable[bool]]) -> None:
        """All of them, until each answers `is_up(number, timeout_s)`. Raises EngineError."""
        for number in self._settings:
            self._spawn(number)
        deadline_s = time.monotonic() + READY_S
        for number in self._settings:
            while self._stopping is None and not await is_up(number, AGAIN_S):
                if self._exits:
                    raise EngineError("API server {} did not start: {}".format(*self._exits[0]))
                if time.monotonic() > deadline_s:
                    raise EngineError(f"API server {number} did not answer within {READY_S:g} s")
                await asyncio.sleep(LOOK_S)

    async def watch(self, is_up: Callable[[int, float], Awaitable[bool]]) -> None:
        """For ever: kill who does not answer for as long as an engine may be silent (heartbeat_timeout_s), or is not up
        in READY_S; look() starts another in its place. To be begun when all have started."""
        await asyncio.gather(*(self._watch(number, is_up) for number in self._settings))

    async def _watch(self, number: int, is_up: Callable[[int, float], Awaitable[bool]]) -> None:
        patience_s = self._settings[number].engine.heartbeat_timeout_s
        while True:
            child = self._children[number]
            if await is_up(number, patience_s) or await is_up(number, AGAIN_S):
                self._ready_by_s[number] = time.monotonic() + patience_s
            elif self._is_late(number, child):
                logger.warning("API server %d has not answered for %g s; it is killed", number, patience_s)
                os.kill(child.pid, signal.SIGKILL)
            await asyncio.sleep(WATCH_S)

    def _is_late(self, number: int, child: Child) -> bool:
        is_running = child is self._children[number] and child.exited() is None and self._stopping is None
        return is_running and time.monotonic() > self._ready_by_s[number]

    def look(self) -> str | None:
        """Start again who died. Returns why the family has to end, None as long as it need not."""
        while self._exits and self._stopping is None and self._trouble is None:
            number, reason = self._exits.popleft()
            now_s = time.monotonic()
            self._restarts.append(now_s)
            while now_s - self._restarts[0] > RESTART_WINDOW_S:
                self._restarts.popleft()
            if len(self._restarts) > MAX_RESTARTS:
                count, window = len(self._restarts), f"{RESTART_WINDOW_S:g} s"
                self._trouble = f"API servers ended {count} times in {window}, the last of them: {reason}"
                return self._trouble
            logger.warning("API server %d ended (%s); it is started again", number, reason)
            self._spawn(number)
        return self._trouble

    def stop(self) -> None:
        """Have them end what they do, each in the time that requests have for that."""
        if self._stopping is not None:
            return
        self._close_listeners()
        self._stopping = [
            threading.Thread(target=child.stop, args=(self._settings[number].config.shutdown_timeout + GRACE_S,))
            for number, child in self._children.items()
        ]
        for thread in self._stopping:
            thread.start()

    def hurry(self) -> None:
        """After stop(): have them end at once."""
        for child in self._children.values():
            if child.exited() is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    async def ended(self) -> None:
        """After stop(): until all are gone."""
        for thread in self._stopping or ():
            await asyncio.to_thread(thread.join)

    def _spawn(self, number: int) -> None:
        settings = self._settings[number]
        self._ready_by_s[number] = time.monotonic() + READY_S
        on_exit = lambda reason: self._exits.append((number, reason))  # noqa: E731
        self._children[number] = supervise.spawn(
            MODULE, settings, f"API server {number}", on_exit, fds=(settings.listener,)
        )
