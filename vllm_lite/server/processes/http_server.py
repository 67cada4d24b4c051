"""HttpServer: one API server in front of a ready engine. Also the entry point of child API servers."""

import asyncio
import gc
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass

import httptools  # noqa: F401 - what connection.py's base parses with: missing, it is to be missed at once
import uvicorn
import uvloop
from starlette.types import ASGIApp

from vllm_lite import transport
from vllm_lite.client.engines.data_parallel import connect
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.client.engines.launch_engines import LaunchedEngines
from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.protocol.api import Welcome
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.machine import MAX_FILES, allow_files
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.connection import HttpConnection, with_timeouts
from vllm_lite.server.processes.api_servers import ApiServers, ApiServerSettings
from vllm_lite.server.processes.scoreboard import Scoreboard
from vllm_lite.server.route_table import example_of
from vllm_lite.server.wiring import Application, EngineLink, ModelFiles
from vllm_lite.transport.time_slice import shorten_slice

_FIRST_ROUTES = (
    ("score", "/rerank"),
    ("embed", "/v1/embeddings"),
    ("token_embed", "/pooling"),
    ("token_classify", "/token_classify"),
)
"""Routes to suggest for a model that generates no text, by its first pooling task."""
START_TIMEOUT_S = 10.0
TICKS_TO_LOOK = 5
ABORT_S = 2.0
"""Seconds for aborted requests to be answered at shutdown."""
UVICORNS_CIPHERS = "TLSv1"
CLOSE_S = 1
FAILED_S = 0.5
"""Seconds for which a server whose engine has died still answers; waited twice."""

logger = log.get(__name__)


class Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, which checks that the clients of its connections read, and reports that the loop
    is alive."""

    def __init__(self, config: uvicorn.Config, report_alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._report_alive = report_alive

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this every 0.1 s."""
        self._report_alive()
        if counter % TICKS_TO_LOOK == 0:
            now_s = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, HttpConnection):
                    connection.look(now_s)
        return await super().on_tick(counter)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


@dataclass
class HttpServer:
    """One API server in front of a ready engine. Server 0 owns the others."""

    config: ServeConfig
    keys: Keys
    engine: EngineLink
    files: ModelFiles
    listener: socket.socket
    scoreboard: Scoreboard
    num_signals: int = 0

    async def run(self, is_stopped: Callable[[], bool], others: ApiServers) -> int:
        """Serve until a signal arrives or the engine ends. Returns the exit status."""
        shorten_slice()  # this loop must not wait for threads that compute
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, ended, others)
        if is_stopped():  # signalled before the loop ran
            return 0
        application = Application(self.config, self.keys, self.engine, self.files, self.scoreboard)
        calls = application.calls
        server = uvicorn_of(application.app, self.config, self.scoreboard.report_alive)
        serving: list[asyncio.Future[None]] = []
        watching = [asyncio.ensure_future(application.watch())]
        try:
            await others.start()
            watching.append(asyncio.ensure_future(others.watch()))
            if ended.is_set():
                return 0
            serving.append(await started(server, self.listener))
            gc.freeze()  # present objects live for ever; a collection before would free hardly anything in 0.05 s
            gc.enable()
            if self.scoreboard.number == 0:
                log.moment("server", "HTTP")
                self.engine.announce(self._where()[0])
                with suppress(OSError):  # nobody reads stdout
                    print(self._greeting(), flush=True)
            return await self._wait(calls, ended, others)
        finally:
            for watch in watching:
                watch.cancel()
            others.stop()
            await application.end_runs()
            server.should_exit = True
            await asyncio.gather(*serving, return_exceptions=True)
            await others.ended()
            application.close()

    async def _wait(self, calls: Calls, ended: asyncio.Event, others: ApiServers) -> int:
        session = self.engine.session
        while session.dead is None and not ended.is_set() and others.restart_ended() is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.1)
        if not ended.is_set():
            if session.dead is None:
                calls.abort_all()
            await until(lambda: not len(calls), FAILED_S)
            await asyncio.sleep(FAILED_S)  # /health answers 503 meanwhile
            if self.scoreboard.number == 0:
                reason = others.trouble if session.dead is None else self.engine.reason()
                print(f"vllm-lite: {reason}", file=sys.stderr)
            return 1
        calls.is_draining = True
        if len(calls):
            logger.info("%d requests have %g s to end", len(calls), self.config.shutdown_timeout)
        await until(lambda: not len(calls) or self.num_signals > 1, self.config.shutdown_timeout)
        self.files.close()
        calls.abort_all()
        await until(lambda: not len(calls), ABORT_S)
        return 0

    def _on_signal(self, ended: asyncio.Event, others: ApiServers) -> None:
        self.num_signals += 1
        others.stop() if self.num_signals == 1 else others.stop_now()
        ended.set()

    def _where(self) -> tuple[str, str]:
        return where(self.config, self.listener)

    def _greeting(self) -> str:
        """The message on stdout: address, model, capacity, and a request to try."""
        config, engine = self.config, self.engine.session.welcome
        name = (config.names or (engine.model,))[0]
        address, curl = self._where()
        auth = "-H 'Authorization: Bearer KEY' " if self.keys.user else ""
        if not engine.pooler.generates:
            path, body = _first_route(engine, name)
        elif self.files.renderer is not None:
            path = "/v1/chat/completions"
            body = f'{{"model":"{name}","messages":[{{"role":"user","content":"Tell me a story."}}],"stream":true}}'
        elif self.files.tokenizer is None:
            path = "/inference/v1/generate"
            body = f'{{"model":"{name}","token_ids":[1,2,3],"sampling_params":{{"max_tokens":50}},"stream":true}}'
        else:
            path = "/v1/completions"
            body = f'{{"model":"{name}","prompt":"Once upon a time","max_tokens":50,"stream":true}}'
        count = self.engine.session.num_engines
        engines, each = (f" with {count} engines", " each") if count > 1 else ("", "")
        cache = f"KV cache of {engine.kv_tokens} tokens{each}" if engine.kv_tokens else "no KV cache"
        return (
            f"vllm-lite: ready at {address}, serving {name}{engines}: {engine.max_model_len} tokens of context, "
            f"{cache}\nTry: {curl}{path} -H 'Content-Type: application/json' {auth}-d '{body}'"
        )


def where(config: ServeConfig, listener: socket.socket) -> tuple[str, str]:
    """Return the address of a server, and the start of a curl command for it."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"unix:{config.uds}", f"curl --unix-socket {config.uds} http://localhost"
    host, port = listener.getsockname()[:2]
    address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    return address, f"curl {address}"


def uvicorn_of(app: ASGIApp, config: ServeConfig, report_alive: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """Make the uvicorn server of an application, with the limits and TLS files of `config`."""
    settings = uvicorn.Config(
        app,
        http=with_timeouts(config.header_timeout_s, config.write_timeout_s),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or UVICORNS_CIPHERS,
    )
    return Uvicorn(settings, report_alive)


def _first_route(engine: Welcome, name: str) -> tuple[str, str]:
    """A route to try on a pooling model, and an example body."""
    path = next((path for task, path in _FIRST_ROUTES if task in engine.pooler.tasks), "/classify")
    return path, json.dumps({"model": name, **example_of(path)}, separators=(",", ":"))


def listen(listener: socket.socket) -> None:
    """Start listening, before uvicorn does so again. SO_REUSEADDR is set so that the next server can bind while
    connections of this one linger. Raises ConfigError."""
    try:
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen()
    except OSError as error:
        name = listener.getsockname()
        where, flag = (name, "--uds") if isinstance(name, str) else (f"{name[0]}:{name[1]}", "--port")
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another {flag}") from error


async def started(server: uvicorn.Server, listener: socket.socket) -> asyncio.Future[None]:
    """Start the server, and return the task that serves. Raises ConfigError if its address is taken, EngineError if it
    ends at once."""
    allow_files(MAX_FILES)  # uvloop closes connections above the limit without a word
    listen(listener)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await until(lambda: server.started or serving.done(), START_TIMEOUT_S)
    if serving.done():
        serving.result()
        raise EngineError("the HTTP server ended as it started")
    return serving


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `condition()`, at most `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - conditions of several kinds
        await asyncio.sleep(0.01)


def serve_first(
    config: ServeConfig,
    keys: Keys,
    launched: LaunchedEngine | LaunchedEngines,
    files: ModelFiles,
    listeners: Sequence[socket.socket],
    stop: threading.Event,
) -> int:
    """Run API server 0 in this process, and the others as its children. Returns the exit status."""
    scoreboard = Scoreboard(config.api_server_count)
    settings = [
        ApiServerSettings(
            config=config,
            keys=keys,
            engine=launched.config,
            addresses=launched.addresses,
            number=number,
            # A Unix socket is shared; at a TCP port each has its own, so that the kernel spreads connections over them.
            listener=listeners[number % len(listeners)].fileno(),
            scoreboard=scoreboard.fd,
        )
        for number in range(1, config.api_server_count)
    ]
    engine = EngineLink(launched.session, launched.config, lambda: launched.reason, launched.announce)
    server = HttpServer(config, keys, engine, files, listeners[0], scoreboard)
    with closing(files), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.run(stop.is_set, ApiServers(settings, scoreboard, listeners[1:])))


def main(settings: ApiServerSettings, stop: Wakeup) -> int:
    """Run one of the other API servers, with a session of its own, until `stop` is set or a signal arrives."""
    config = settings.config
    log.setup(f"server {settings.number}", *config.logging)
    session = connect(settings.addresses, settings.engine)
    scoreboard = Scoreboard(config.api_server_count, settings.number, settings.scoreboard)
    engine = EngineLink(session, settings.engine, lambda: str(session.dead))
    try:
        with closing(ModelFiles(config, settings.engine)) as files, socket.socket(fileno=settings.listener) as listener:
            server = HttpServer(config, settings.keys, engine, files, listener, scoreboard)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(server.run(stop.is_set, ApiServers((), scoreboard)))
    finally:
        session.close()
        transport.finish()


if __name__ == "__main__":
    supervise.run_child(main, ApiServerSettings, graceful=True)
