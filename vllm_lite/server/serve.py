"""`vllm-lite serve`: engine, workers and HTTP in one command, until SIGTERM, Ctrl-C, or the engine's end."""

import asyncio
import gc
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httptools  # noqa: F401 - what connection.py's base parses with: missing, it is to be missed at once
import msgspec
import uvicorn
import uvloop

from vllm_lite import log
from vllm_lite.client.chat_template import ChatTemplate
from vllm_lite.client.launch import Launched, launch
from vllm_lite.client.stream import StreamFactory, load_tokenizer
from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.config import DEVICE_DEFAULTS, EngineConfig
from vllm_lite.errors import ConfigError, EngineError, ModelError, VllmLiteError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.api import Api, Model, build
from vllm_lite.server.calls import Calls
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.connection import limited
from vllm_lite.server.prompts import Prompts
from vllm_lite.server.relay import Relay

START_TIMEOUT_S = 10.0
ABORT_S = 2.0
"""How long what is aborted at the end may take to tell its clients so."""
CLOSE_S = 1
LAST_WORDS_S = 0.5
_GENERATION = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"}

logger = log.get(__name__)


class Loaded:
    """What the server reads of the model while the engine starts."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self.defaults: dict[str, Any] = {}

    def load(self, resolved: EngineConfig) -> None:
        """Raises ModelError."""
        self.tokenizer = load_tokenizer(self._config.tokenizer, resolved.tokenizer or resolved.model)
        self.template = ChatTemplate.load(resolved.tokenizer or resolved.model, self._config.chat_template)
        if self._config.generation_config == "auto":
            self.defaults = generation_defaults(Path(resolved.model))


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling defaults of the checkpoint's generation_config.json. Raises ModelError."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        found = {name: given[name] for name in _GENERATION if given.get(name) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        found = {name: value for name, value in found.items() if name in SamplingParams.__struct_fields__}
        SamplingParams(**found)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: {error}; correct it, or give --generation-config vllm") from error
    if found:
        logger.info("sampling defaults of the model: %s (--generation-config vllm ignores them)", found)
    return found


def serve(config: ServeConfig) -> int:
    """Returns the exit status: 0 if told to stop, 1 if the engine died. Raises VllmLiteError if it cannot start."""
    log.setup("server", *config.logging)
    keys = config.keys()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _check_tls(config)
    listener = _bind(config)
    try:
        loaded = Loaded(config)
        try:
            launched = launch(config.engine(), stop.is_set, loaded.load)
        except VllmLiteError:
            if stop.is_set():
                return 0
            raise
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_Service(config, launched, loaded, keys, listener).run(stop))
        finally:
            launched.close()
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _bind(config: ServeConfig) -> socket.socket:
    """The socket, which refuses connections until there is something to serve. Raises ConfigError."""
    try:
        if config.uds is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _remove_stale(config.uds)
            listener.bind(config.uds)
            os.chmod(config.uds, 0o600)
            return listener
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; choose another") from error
    return listener


def _remove_stale(path: str) -> None:
    """A socket that nobody listens on any more is in the way; one that somebody does is not ours to remove."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _check_tls(config: ServeConfig) -> None:
    """What uvicorn would meet when the engine has started already. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        if config.ssl_certfile is not None:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs)))
        raise ConfigError(f"the TLS files {files} cannot be used: {error}") from error


class _Uvicorn(uvicorn.Server):
    """Signals are ours."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class _Service:
    """A ready engine and the HTTP server in front of it."""

    def __init__(
        self,
        config: ServeConfig,
        launched: Launched,
        loaded: Loaded,
        keys: tuple[str, ...],
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._launched = launched
        self._loaded = loaded
        self._keys = keys
        self._listener = listener
        self._num_signals = 0

    async def run(self, stop: threading.Event) -> int:
        """Until the end. Returns the exit status."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, ended)
        if stop.is_set():  # told before there was a loop
            return 0
        calls = self._calls(loop)
        server = _Uvicorn(self._uvicorn_config(calls))
        serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        watching = asyncio.ensure_future(calls.watch())
        try:
            await _until(lambda: server.started or serving.done(), START_TIMEOUT_S)
            if serving.done():
                serving.result()
                raise EngineError("the HTTP server ended as it started")
            gc.collect()
            gc.freeze()  # what lives now lives for ever
            with suppress(OSError):  # nobody reads it; the service goes on
                print(self._greeting(), flush=True)
            return await self._wait(calls, ended)
        finally:
            watching.cancel()
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await serving

    async def _wait(self, calls: Calls, ended: asyncio.Event) -> int:
        session = self._launched.session
        while session.dead is None and not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.1)
        if not ended.is_set():
            await _until(lambda: not len(calls), LAST_WORDS_S)
            await asyncio.sleep(LAST_WORDS_S)  # health says so to whoever looks
            print(f"vllm-lite: {self._launched.reason}", file=sys.stderr)
            return 1
        calls.is_draining = True
        if len(calls):
            logger.info("%d requests have %g s to end", len(calls), self._config.shutdown_timeout)
        await _until(lambda: not len(calls) or self._num_signals > 1, self._config.shutdown_timeout)
        calls.abort_all()
        await _until(lambda: not len(calls), ABORT_S)
        return 0

    def _on_signal(self, ended: asyncio.Event) -> None:
        self._num_signals += 1
        ended.set()

    def _calls(self, loop: asyncio.AbstractEventLoop) -> Calls:
        resolved = self._launched.config
        return Calls(
            Relay(self._launched.session, loop),
            capacity=resolved.max_num_seqs or DEVICE_DEFAULTS["cpu"].max_num_seqs,
            max_queued=self._config.max_num_queued_reqs,
            write_timeout_s=self._config.write_timeout_s,
        )

    def _uvicorn_config(self, calls: Calls) -> uvicorn.Config:
        config, engine, loaded = self._config, self._launched.engine, self._loaded
        names = config.names or (engine.model,)
        model = Model(names, None if config.names else config.model, engine.max_model_len, loaded.defaults)
        prompts = Prompts(loaded.tokenizer, loaded.template)
        api = Api(config, model, StreamFactory(engine, loaded.tokenizer), prompts, calls)
        return uvicorn.Config(
            build(api, config, self._keys),
            http=limited(config.header_timeout_s),
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
        )

    def _greeting(self) -> str:
        """Where it is, what it serves, what it holds, and something to try."""
        config, engine = self._config, self._launched.engine
        name = (config.names or (engine.model,))[0]
        scheme = "https" if config.ssl_certfile else "http"
        if config.uds is not None:
            where, curl = f"unix:{config.uds}", f"curl --unix-socket {config.uds} http://localhost"
        else:
            host, port = self._listener.getsockname()[:2]
            where = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
            curl = f"curl {where}"
        auth = "-H 'Authorization: Bearer KEY' " if self._keys else ""
        if self._loaded.template is not None:
            path = "/v1/chat/completions"
            body = f'{{"model":"{name}","messages":[{{"role":"user","content":"Tell me a story."}}],"stream":true}}'
        else:
            path = "/v1/completions"
            body = f'{{"model":"{name}","prompt":"Once upon a time","max_tokens":50,"stream":true}}'
        tokens = (engine.num_blocks - 1) * engine.block_size  # one is the null block
        return (
            f"vllm-lite: ready at {where}, serving {name}: {engine.max_model_len} tokens of context, "
            f"KV cache of {tokens} tokens\n"
            f"Try: {curl}{path} -H 'Content-Type: application/json' {auth}-d '{body}'"
        )


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `condition()`, at most `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - conditions of several kinds
        await asyncio.sleep(0.01)
