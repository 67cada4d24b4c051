"""A private server: without output, reached over a socket in a private folder, and ended with its owner."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from vllm_lite.errors import EngineError
from vllm_lite.runtime import supervise
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.processes import child_server

STOP_GRACE_S = 6.0
"""Longer than the server needs to end its engine."""


class PrivateServer:
    """A context manager. Entering it waits until the server is ready, and calls `starting(elapsed_s)` meanwhile."""

    def __init__(self, config: ServeConfig, starting: Callable[[float], None] = lambda _: None) -> None:
        self._run_dir = supervise.make_dir()
        path = child_server.socket_path(self._run_dir)
        self.url = f"unix:{path}"
        self._log = f"{self._run_dir}/log"
        self._starting = starting
        self._timeout_s = config.ready_timeout_s
        output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._child = child_server.start(private(config, path), self._run_dir, output, "server", lambda _: None)
        except BaseException:
            supervise.remove_dir(self._run_dir)
            raise
        finally:
            os.close(output)

    def __enter__(self) -> Self:
        """Wait until it is ready. Raises EngineError with the server's own message if it cannot start."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reason(self) -> str | None:
        """The reason why it ended, with its last message if there is one; None while it runs."""
        ended = self._child.exited()
        if ended is None:
            return None
        text = ""
        with suppress(OSError):
            text = Path(self._log).read_text(errors="replace")
        prefix = child_server.ERROR_PREFIX
        said = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
        return said[-1] if said else f"the server ended: {ended}"

    def close(self) -> None:
        """End the server, its engine and its workers; remove their folder."""
        self._child.stop(STOP_GRACE_S)
        supervise.remove_dir(self._run_dir)

    def _wait_until_ready(self) -> None:
        began_s = time.monotonic()
        while not child_server.listens(self._run_dir):
            elapsed_s = time.monotonic() - began_s
            if self._child.exited() is not None:
                raise EngineError(self.reason() or "the server ended")
            if elapsed_s > self._timeout_s:
                raise EngineError(f"the server was not ready within {self._timeout_s:g} s (ready_timeout_s)")
            self._starting(elapsed_s)
            time.sleep(child_server.LOOK_S)


def private(config: ServeConfig, path: str) -> ServeConfig:
    """Adapt `config` to a socket that only this user can reach: no API keys, no TLS, no grace period at the end."""
    return msgspec.structs.replace(
        config,
        uds=path,
        api_key=(),
        api_key_file=None,
        ssl_keyfile=None,
        ssl_certfile=None,
        ssl_ca_certs=None,
        ssl_cert_reqs=0,
        shutdown_timeout=0.0,
    )
