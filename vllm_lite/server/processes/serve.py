"""`vllm-lite serve`: engine, workers and HTTP in one command, until SIGTERM, Ctrl-C, or the engine's end."""

import errno
import os
import signal
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lite.client.engines.launch_engines import launch_engines
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError, VllmLiteError
from vllm_lite.runtime import log
from vllm_lite.server.config import ServeConfig

if TYPE_CHECKING:
    from vllm_lite.server.wiring import ModelFiles


def serve(config: ServeConfig) -> int:
    """Run the server. Returns the exit status: 0 after a signal, 1 if the engine died. Raises VllmLiteError if it
    cannot start."""
    log.moment("server", "imports")
    log.setup("server", *config.logging)
    keys = config.keys()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    check_tls(config)
    check_collector(config)
    listeners = bind(config)
    files: list[ModelFiles] = []
    try:
        try:
            launched = launch_engines(
                config.engine(),
                stop.is_set,
                lambda engine: files.append(_load(config, engine)),
                template=config.chat_template,
            )
        except VllmLiteError:
            if stop.is_set():
                return 0
            raise
        try:
            from vllm_lite.server.processes.http_server import serve_first

            return serve_first(config, keys, launched, files[0], listeners, stop)
        finally:
            launched.close()
    finally:
        for listener in listeners:
            listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _load(config: ServeConfig, engine: ResolvedConfig) -> "ModelFiles":
    """Load the model's files while the engine starts, which takes longer; the import is slow as well."""
    from vllm_lite.server.wiring import ModelFiles

    return ModelFiles(config, engine)


def bind(config: ServeConfig) -> list[socket.socket]:
    """Bind one socket per API server, or one for all, which refuse connections until the server is ready. Raises
    ConfigError."""
    try:
        if config.uds is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _remove_stale(config.uds)
            listener.bind(config.uds)
            os.chmod(config.uds, 0o600)
            return [listener]
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        first = _bound(family, kind, proto, address)
        if config.api_server_count == 1:
            return [first]
        address = first.getsockname()  # exclusively ours; now it can be shared
        first.close()
        return [_bound(family, kind, proto, address, shared=True) for _ in range(config.api_server_count)]
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        where, flag = f"{config.host}:{config.port}", "--host" if is_host else "--port"
        if config.uds is not None:
            where, flag = config.uds, "--uds"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; choose another {flag}") from error


def _bound(family: int, kind: int, proto: int, address: Any, *, shared: bool = False) -> socket.socket:
    """Bind a socket so that nobody else can take its address before it listens. With SO_REUSEADDR another server could,
    and would notice only when its engine has started.

    The option is needed only where connections of an earlier server linger, and is set only for binding; `listen` of
    http_server.py sets it for the next server.
    """
    listener = socket.socket(family, kind, proto)
    try:
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket file that no process listens on. One with a listener is left alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def check_collector(config: ServeConfig) -> None:
    """Check the collector's URL and the packages for it before the engine starts. Raises ConfigError."""
    if config.otlp_traces_endpoint is not None:
        from vllm_lite.server.collector import Collector

        Collector(config.otlp_traces_endpoint).check()


def check_tls(config: ServeConfig) -> None:
    """Check TLS files before the engine starts, as uvicorn would only afterwards. Raises ConfigError."""
    if config.ssl_certfile is None and config.ssl_ca_certs is None:
        return
    import ssl  # imported only for TLS, so that other servers start their engine sooner

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"ssl_ciphers {config.ssl_ciphers!r} name no cipher that OpenSSL has: {error}") from error
    try:
        if config.ssl_certfile is not None:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # includes ssl.SSLError
        files = ", ".join(filter(None, (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs)))
        raise ConfigError(f"the TLS files {files} cannot be used: {error}") from error
