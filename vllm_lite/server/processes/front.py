"""All of `vllm-lite serve` in front of the engine: the first HTTP server, in this process, and the others."""

import asyncio
import socket
import threading
from collections.abc import Sequence

import uvloop

from vllm_lite.client.launch import Launched
from vllm_lite.config import ResolvedConfig
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes.api_servers import ApiSettings, Family
from vllm_lite.server.processes.loaded import Loaded
from vllm_lite.server.processes.service import Engine, Place, Service


class Front:
    """Loaded when made, of what `engine` serves."""

    def __init__(self, config: ServeConfig, engine: ResolvedConfig) -> None:
        """Raises ModelError."""
        self._config = config
        self._loaded = Loaded(config)
        self._loaded.load(engine)

    def run(self, launched: Launched, keys: Keys, listeners: Sequence[socket.socket], stop: threading.Event) -> int:
        """Serve until `stop`, or until the engine ends. Returns the exit status."""
        try:
            return self._run(launched, keys, listeners, stop)
        finally:
            self._loaded.close()

    def _run(self, launched: Launched, keys: Keys, listeners: Sequence[socket.socket], stop: threading.Event) -> int:
        engine = Engine(launched.session, launched.config, lambda: launched.reason, launched.announce)
        place = Place(0, self._config.api_server_count, launched.run_dir)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            service = Service(self._config, keys, engine, self._loaded, place, listeners[0])
            return runner.run(service.run(stop, _family(self._config, keys, launched, listeners)))


def _family(config: ServeConfig, keys: Keys, launched: Launched, listeners: Sequence[socket.socket]) -> Family:
    """The servers beside the first one. Those of one Unix socket share it; at a port each has its own, so that the
    kernel spreads connections over them."""

    def close() -> None:
        for listener in listeners[1:]:
            listener.close()

    settings = [
        ApiSettings(
            config=config,
            keys=keys,
            engine=launched.config,
            address=launched.address,
            run_dir=launched.run_dir,
            number=number,
            listener=listeners[number % len(listeners)].fileno(),
        )
        for number in range(1, config.api_server_count)
    ]
    return Family(settings, close)
