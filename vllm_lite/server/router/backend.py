"""ModelServer: the processes of one model, which the router starts, stops, wakes, puts to sleep, and forwards requests
to."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from vllm_lite.errors import EngineError
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.supervise import Child
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes import child_server
from vllm_lite.server.router.upstream import Header, UpstreamAnswer, UpstreamLost, open_answer

STOP_GRACE_S = 8.0
"""Seconds for a server to end its engine, once its requests have ended."""
ASK_S = 10.0
LAST_LINES_S = 1.0
"""Seconds to read the last output of an ended server, whose engine may keep the pipe open."""
_GREETING = ("vllm-lite: ready at", "Try: ")

logger = log.get(__name__)


class ModelServer:
    """The processes of a model, from one `start` to one `stop`; neither can be repeated."""

    def __init__(self, name: str, config: ServeConfig, keys: Keys, on_end: Callable[[], None]) -> None:
        """`keys` are those that the model's server accepts; the router's own admin key is the last. `on_end` is called
        on another thread when the server has ended, for any reason."""
        self.name = name
        self._run_dir = supervise.make_dir()
        self.socket_path = child_server.socket_path(self._run_dir)
        self._config = private(config, keys, self.socket_path)
        self._admin = [(b"authorization", b"Bearer " + keys.admin[-1].encode())] if keys.admin else []
        self._on_end = on_end
        self._child: Child | None = None
        self._output: threading.Thread | None = None
        self._reason = self._end = ""

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    def ended(self) -> str | None:
        """The reason why the server ended, as printed by itself if possible; None while it runs."""
        return None if not self._end else self._reason or f"its server ended: {self._end}"

    async def start(self) -> None:
        """Start the server, and return when it is ready. Raises EngineError with the server's message if it fails."""
        self._child = await asyncio.to_thread(self._spawn)
        until_s = time.monotonic() + self._config.ready_timeout_s
        while not child_server.listens(self._run_dir):
            if (reason := self.ended()) is not None:
                raise EngineError(reason)
            if time.monotonic() > until_s:
                raise EngineError(f"it was not ready within {self._config.ready_timeout_s:g} s (ready_timeout_s)")
            await asyncio.sleep(child_server.LOOK_S)

    async def sleep(self, level: int) -> None:
        """Free weights and KV cache; streams pause, and the cache is written to disk if the model has a folder for it.
        Raises EngineError."""
        await self._operate(f"/sleep?level={level}&mode=keep")

    async def wake(self) -> None:
        """Reload the model; paused streams continue. Raises EngineError."""
        await self._operate("/wake_up")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop all processes, giving requests `grace_s` to end. Returns when the processes have exited."""
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, grace_s + STOP_GRACE_S)
        await asyncio.to_thread(supervise.remove_dir, self._run_dir)

    async def kill(self) -> None:
        """Kill the server, so that its streams end with an error; its engine and workers follow."""
        if self._child is not None:
            await asyncio.to_thread(self._child.kill)
        await asyncio.to_thread(supervise.remove_dir, self._run_dir)

    async def open(self, method: str, target: bytes, headers: list[Header], body: bytes) -> UpstreamAnswer:
        """Forward a client's request. Raises UpstreamLost."""
        return await open_answer(self.socket_path, method, target, headers, body)

    async def get(self, path: str, timeout_s: float = ASK_S) -> bytes:
        """GET a route, and return the body of its answer. Raises EngineError."""
        return await self._ask("GET", path, timeout_s)

    async def _operate(self, path: str) -> None:
        await self._ask("POST", path, self._config.ready_timeout_s)

    async def _ask(self, method: str, path: str, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await open_answer(self.socket_path, method, path.encode(), self._admin)
                try:
                    body = await answer.whole()
                finally:
                    answer.close()
        except TimeoutError as error:
            raise EngineError(f"{path} was not answered within {timeout_s:g} s") from error
        except UpstreamLost as error:
            raise EngineError(self.ended() or f"{path}: {error}") from error
        if answer.status != 200:
            raise EngineError(f"{path} was answered with {answer.status}: {_message(body)}")
        return body

    def _spawn(self) -> Child:
        read_end, write_end = os.pipe()
        try:
            child = child_server.start(self._config, self._run_dir, write_end, f"server of {self.name}", self._ended)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._output = threading.Thread(
            target=self._pass_on, args=(read_end,), name=f"output of {self.name}", daemon=True
        )
        self._output.start()
        return child

    def _ended(self, reason: str) -> None:
        if self._output is not None:
            self._output.join(LAST_LINES_S)  # its last output may have the reason
        self._end = reason
        self._on_end()

    def _pass_on(self, descriptor: int) -> None:
        """Print the server's lines with the model's name as prefix, and keep the last error among them."""
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(_GREETING):
                    continue  # it names the private socket
                if line.startswith(child_server.ERROR_PREFIX):
                    self._reason = line.removeprefix(child_server.ERROR_PREFIX).strip()
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"[{self.name}] {line}")


def private(config: ServeConfig, keys: Keys, path: str) -> ServeConfig:
    """Adapt a model's settings to a socket that only the router reaches."""
    return msgspec.structs.replace(
        config, uds=path, api_key=keys.user, api_key_file=None, admin_api_key=keys.admin, admin_api_key_file=None
    )


def _message(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
    return str(found)
