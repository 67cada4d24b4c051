"""`vllm-lite serve --models`: the router and the processes of its models, until SIGTERM or Ctrl-C."""

import asyncio
import gc
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes.http_server import ABORT_S, started, until, uvicorn_of, where
from vllm_lite.server.processes.serve import bind, check_collector, check_tls
from vllm_lite.server.router.app import build
from vllm_lite.server.router.backend import ModelServer
from vllm_lite.server.router.catalog import Catalog, Entry, read_catalog
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.server.router.fleet import Fleet

logger = log.get(__name__)


def serve_models(config: RouterConfig) -> int:
    """Serve several models. Returns the exit status. Raises VllmLiteError if it cannot start."""
    log.setup("router", *config.logging)
    catalog, of_file = read_catalog(str(config.models), config)
    config = config.over(of_file)
    for entry in catalog.entries.values():
        if entry.trouble is not None:
            logger.warning("not served: %s", entry.trouble)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    keys = config.keys()
    check_tls(config)
    check_collector(config)
    listeners = bind(msgspec.structs.replace(config, api_server_count=1))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Router(config, catalog, keys, listeners[0]).run(stop.is_set))
    finally:
        for listener in listeners:
            listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


class _Router:
    """The router's process."""

    def __init__(self, config: RouterConfig, catalog: Catalog, keys: Keys, listener: socket.socket) -> None:
        self._config = config
        self._catalog = catalog
        self._keys = keys
        self._listener = listener
        self._num_signals = 0

    async def run(self, is_stopped: Callable[[], bool]) -> int:
        """Serve until a signal arrives. Returns the exit status."""
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, ended)
        if is_stopped():  # signalled before the loop ran
            return 0
        fleet = Fleet(self._catalog, self._config, self._backend)
        server = uvicorn_of(build(fleet, self._config, self._keys), self._config)
        serving = await started(server, self._listener)
        running = asyncio.ensure_future(fleet.run())
        gc.freeze()
        gc.enable()
        try:
            with suppress(OSError):
                print(self._greeting(fleet), flush=True)
            waiting = asyncio.ensure_future(ended.wait())
            await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # it should never return: raise its error
            return 0
        finally:
            running.cancel()
            await self._drain(fleet)
            server.should_exit = True
            await asyncio.gather(serving, running, return_exceptions=True)

    async def _drain(self, fleet: Fleet) -> None:
        """Let requests end: their models answer each with its output so far at the timeout."""
        closing = asyncio.ensure_future(fleet.close(self._config.shutdown_timeout))
        num_before = self._num_signals
        while not closing.done() and self._num_signals == num_before:
            await asyncio.wait((closing,), timeout=0.1)
        if not closing.done():
            await fleet.close(0.0)
        await asyncio.gather(closing, return_exceptions=True)
        await until(lambda: not any(member.status.num_active for member in fleet.members.values()), ABORT_S)

    def _backend(self, entry: Entry, on_end: Callable[[], None]) -> ModelServer:
        config = entry.config
        if config is None:
            raise ConfigError(str(entry.trouble))
        return ModelServer(entry.name, config, keys_of(config, self._keys), on_end)

    def _on_signal(self, ended: asyncio.Event) -> None:
        self._num_signals += 1
        ended.set()

    def _greeting(self, fleet: Fleet) -> str:
        address, curl = where(self._config, self._listener)
        names = [name for name, member in fleet.members.items() if member.trouble is None]
        auth = "-H 'Authorization: Bearer KEY' " if self._keys.user else ""
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        room = f"{self._config.memory_bytes / 2**30:.1f} GiB"
        return (
            f"vllm-lite: ready at {address}, serving {len(names)} models in {room} of memory: {shown or 'none yet'}\n"
            f"Try: {curl}/v1/models {auth}".rstrip()
        )


def keys_of(config: ServeConfig, router: Keys) -> Keys:
    """Keys of one model's processes: the router's, the model's own, and one that only the router has. Without any keys,
    programs on this machine are admins, which includes the router."""
    own = config.keys()
    user, admin = (*router.user, *own.user), (*router.admin, *own.admin)
    if not user and not admin:
        return Keys()
    return Keys(user, (*admin, secrets.token_urlsafe(32)))
