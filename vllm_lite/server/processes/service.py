"""One process's HTTP server in front of a ready engine."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import httptools  # noqa: F401 - what connection.py's base parses with: missing, it is to be missed at once
import uvicorn
from starlette.applications import Starlette

from vllm_lite.client.session import Session
from vllm_lite.client.stream import StreamFactory
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.runtime import log
from vllm_lite.server.app import Api, Model, build, build_private
from vllm_lite.server.calls.registry import Calls, Limits
from vllm_lite.server.calls.relay import Relay
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.connection import Connection, limited
from vllm_lite.server.http.reading import Reader
from vllm_lite.server.live_requests import Requests
from vllm_lite.server.metrics import Metrics
from vllm_lite.server.openai.prompts import Prompts
from vllm_lite.server.processes.api_servers import Family
from vllm_lite.server.processes.loaded import Loaded
from vllm_lite.server.processes.siblings import Siblings, socket_path

START_TIMEOUT_S = 10.0
TICKS_TO_LOOK = 5
ABORT_S = 2.0
"""How long what is aborted at the end may take to tell its clients so."""
CLOSE_S = 1
LAST_WORDS_S = 0.5

logger = log.get(__name__)


class Engine(NamedTuple):
    """A ready one, and its resolved config. `reason()` says why it ended; `announce(url)` hears where it is served."""

    session: Session
    config: ResolvedConfig
    reason: Callable[[], str]
    announce: Callable[[str], None] = lambda _: None


class Place(NamedTuple):
    """Of one server among `num_servers`, which can find each other in `run_dir`."""

    number: int
    num_servers: int
    run_dir: str


class Stop(Protocol):
    def is_set(self) -> bool: ...


class _Uvicorn(uvicorn.Server):
    """Signals are ours, and so is a look at each connection whether its client reads."""

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s."""
        if counter % TICKS_TO_LOOK == 0:
            now_s = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.look(now_s)
        return await super().on_tick(counter)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class Service:
    """See the module. Server number 0 owns the others, its family."""

    def __init__(
        self, config: ServeConfig, keys: Keys, engine: Engine, loaded: Loaded, place: Place, listener: socket.socket
    ) -> None:
        self._config = config
        self._keys = keys
        self._engine = engine
        self._loaded = loaded
        self._place = place
        self._listener = listener
        self._num_signals = 0

    async def run(self, stop: Stop, family: Family) -> int:
        """Until the end. Returns the exit status."""
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, ended, family)
        if stop.is_set():  # told before there was a loop
            return 0
        siblings = Siblings(self._place.run_dir, self._place.number, self._place.num_servers)
        calls = self._calls()
        servers = self._servers(calls, siblings)
        serving: list[asyncio.Future[None]] = []
        watching = [asyncio.ensure_future(calls.watch())]
        try:
            await family.start(siblings.is_up)
            watching.append(asyncio.ensure_future(family.watch(siblings.is_up)))
            if ended.is_set():
                return 0
            for server, listener in servers:
                serving.append(await _started(server, listener))
            gc.collect()
            gc.freeze()  # what lives now lives for ever
            if self._place.number == 0:
                log.moment("server", "HTTP")
                self._engine.announce(self._where()[0])
                with suppress(OSError):  # nobody reads it; the service goes on
                    print(self._greeting(), flush=True)
            return await self._wait(calls, ended, family)
        finally:
            for watch in watching:
                watch.cancel()
            family.stop()
            for server, _ in servers:
                server.should_exit = True
            await asyncio.gather(*serving, return_exceptions=True)
            await family.ended()
            await siblings.close()

    async def _wait(self, calls: Calls, ended: asyncio.Event, family: Family) -> int:
        session = self._engine.session
        while session.dead is None and not ended.is_set() and family.look() is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.1)
        if not ended.is_set():
            if session.dead is None:
                calls.abort_all()
            await _until(lambda: not len(calls), LAST_WORDS_S)
            await asyncio.sleep(LAST_WORDS_S)  # health says so to whoever looks
            if self._place.number == 0:
                print(f"vllm-lite: {family.look() if session.dead is None else self._engine.reason()}", file=sys.stderr)
            return 1
        calls.is_draining = True
        if len(calls):
            logger.info("%d requests have %g s to end", len(calls), self._config.shutdown_timeout)
        await _until(lambda: not len(calls) or self._num_signals > 1, self._config.shutdown_timeout)
        self._loaded.close()
        calls.abort_all()
        await _until(lambda: not len(calls), ABORT_S)
        return 0

    def _on_signal(self, ended: asyncio.Event, family: Family) -> None:
        self._num_signals += 1
        family.stop() if self._num_signals == 1 else family.hurry()
        ended.set()

    def _calls(self) -> Calls:
        config, count = self._config, self._place.num_servers
        tokens = config.max_num_queued_tokens
        limits = Limits(
            capacity=-(-self._engine.config.max_num_seqs // count),
            max_queued=-(-config.max_num_queued_reqs // count),
            max_queued_of_all=config.max_num_queued_reqs,
            max_queued_tokens=None if tokens is None else -(-tokens // count),
        )
        relay = Relay(self._engine.session, asyncio.get_running_loop())
        return Calls(relay, limits, number=self._place.number)

    def _private_listener(self) -> socket.socket:
        """Where the other servers ask."""
        path = socket_path(self._place.run_dir, self._place.number)
        with suppress(FileNotFoundError):
            os.unlink(path)  # of the one in whose place this one was started
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        os.chmod(path, 0o600)
        return listener

    def _servers(self, calls: Calls, siblings: Siblings) -> list[tuple[uvicorn.Server, socket.socket]]:
        """The public one, and one for the other servers if there are any, with their sockets."""
        config, loaded, limits = self._config, self._loaded, self._engine.session.welcome
        names = config.names or (limits.model,)
        model = Model(names, None if config.names else config.model, limits.max_model_len, loaded.defaults)
        factory, reader = StreamFactory(limits, loaded.tokenizer), Reader(config, limits.max_model_len)
        requests = Requests(calls, factory, reader, siblings)
        prompts = Prompts(loaded.tokenizer, loaded.renderer, limits.max_model_len)
        api = Api(config, model, factory, prompts, requests)
        tls = {
            "ssl_keyfile": config.ssl_keyfile,
            "ssl_certfile": config.ssl_certfile,
            "ssl_ca_certs": config.ssl_ca_certs,
            "ssl_cert_reqs": config.ssl_cert_reqs,
        }
        metrics = Metrics(calls, self._engine.config, limits, names[0], str(self._place.number))
        public = self._server(build(api, requests, config, self._keys, metrics), **tls)
        if not siblings:
            return [(public, self._listener)]
        private = self._server(build_private(Requests(calls, factory, reader, siblings, is_private=True)))
        return [(public, self._listener), (private, self._private_listener())]

    def _server(self, app: Starlette, **tls: Any) -> uvicorn.Server:
        return _Uvicorn(
            uvicorn.Config(
                app,
                http=limited(self._config.header_timeout_s, self._config.write_timeout_s),
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=CLOSE_S,
                **tls,
            )
        )

    def _where(self) -> tuple[str, str]:
        """The address, and how curl begins to speak to it."""
        config = self._config
        scheme = "https" if config.ssl_certfile else "http"
        if config.uds is not None:
            return f"unix:{config.uds}", f"curl --unix-socket {config.uds} http://localhost"
        host, port = self._listener.getsockname()[:2]
        where = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        return where, f"curl {where}"

    def _greeting(self) -> str:
        """Where it is, what it serves, what it holds, and something to try."""
        config, engine = self._config, self._engine.session.welcome
        name = (config.names or (engine.model,))[0]
        where, curl = self._where()
        auth = "-H 'Authorization: Bearer KEY' " if self._keys.user else ""
        if self._loaded.renderer is not None:
            path = "/v1/chat/completions"
            body = f'{{"model":"{name}","messages":[{{"role":"user","content":"Tell me a story."}}],"stream":true}}'
        elif self._loaded.tokenizer is None:
            path = "/inference/v1/generate"
            body = f'{{"model":"{name}","token_ids":[1,2,3],"sampling_params":{{"max_tokens":50}},"stream":true}}'
        else:
            path = "/v1/completions"
            body = f'{{"model":"{name}","prompt":"Once upon a time","max_tokens":50,"stream":true}}'
        tokens = (engine.num_blocks - 1) * engine.block_size  # one is the null block
        return (
            f"vllm-lite: ready at {where}, serving {name}: {engine.max_model_len} tokens of context, "
            f"KV cache of {tokens} tokens\n"
            f"Try: {curl}{path} -H 'Content-Type: application/json' {auth}-d '{body}'"
        )


def listen(listener: socket.socket) -> None:
    """Take connections; uvicorn does the same again. They may linger after the end without being in the way of the
    next server. Raises ConfigError."""
    try:
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen()
    except OSError as error:
        where = ":".join(map(str, listener.getsockname()[:2]))
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another") from error


async def _started(server: uvicorn.Server, listener: socket.socket) -> asyncio.Future[None]:
    """The server at work. Raises ConfigError if its address is taken, EngineError if it ends at once."""
    listen(listener)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await _until(lambda: server.started or serving.done(), START_TIMEOUT_S)
    if serving.done():
        serving.result()
        raise EngineError("the HTTP server ended as it started")
    return serving


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `condition()`, at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - conditions of several kinds
        await asyncio.sleep(0.01)
