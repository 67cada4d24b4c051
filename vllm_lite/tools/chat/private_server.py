"""A private server: without output, reached over a socket in a private folder, and ended with its owner."""

import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.runtime import supervise
from vllm_lite.runtime.addresses import check_address
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.processes.child_server import ChildServerSettings, log_path

MODULE = "vllm_lite.server.processes.child_server"
STOP_GRACE_S = 6.0
"""Longer than the server needs to end its engine."""
LOOK_S = 0.02
_LINE = "vllm-lite: "
"""Prefix of the last line of a server that cannot start."""


class PrivateServer:
    """A context manager. Entering it waits until the server is ready, and calls `starting(elapsed_s)` meanwhile."""

    def __init__(self, config: ServeConfig, starting: Callable[[float], None] = lambda _: None) -> None:
        self._run_dir = tempfile.mkdtemp(prefix="vl-")  # mode 0700
        path = f"{self._run_dir}/http"
        self.url = f"unix:{path}"
        self._path = path
        self._starting = starting
        self._timeout_s = config.ready_timeout_s
        try:
            check_address(f"ipc://{path}")
            settings = ChildServerSettings(private(config, path), self._run_dir)
            self._child = supervise.spawn(MODULE, settings, "server", lambda _: None)
        except ValueError as error:
            supervise.remove_dir(self._run_dir)
            raise ConfigError(f"{error}; set TMPDIR to a shorter folder") from error
        except BaseException:
            supervise.remove_dir(self._run_dir)
            raise

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
            text = Path(log_path(self._run_dir)).read_text(errors="replace")
        said = [line.removeprefix(_LINE) for line in text.splitlines() if line.startswith(_LINE)]
        return said[-1] if said else f"the server ended: {ended}"

    def close(self) -> None:
        """End the server, its engine and its workers; remove their folder."""
        self._child.stop(STOP_GRACE_S)
        supervise.remove_dir(self._run_dir)

    def _wait_until_ready(self) -> None:
        began_s = time.monotonic()
        while not self._listens():
            elapsed_s = time.monotonic() - began_s
            if self._child.exited() is not None:
                raise EngineError(self.reason() or "the server ended")
            if elapsed_s > self._timeout_s:
                raise EngineError(f"the server was not ready within {self._timeout_s:g} s (ready_timeout_s)")
            self._starting(elapsed_s)
            time.sleep(LOOK_S)

    def _listens(self) -> bool:
        """Whether it accepts connections, as it does once it is ready."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(self._path)
            except OSError:
                return False
        return True


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
