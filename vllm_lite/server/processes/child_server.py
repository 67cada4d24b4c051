"""`serve` as a child of the process that uses it: listens on a socket in a private folder, and ends with that process.

Its owner gives it a file for the output of the server, its engine and workers, so that these do not write to the
owner's terminal.
"""

import os
import socket
import sys
from collections.abc import Callable

import msgspec

from vllm_lite.errors import ConfigError, VllmLiteError
from vllm_lite.runtime import supervise
from vllm_lite.runtime.addresses import check_address
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.server.config import ServeConfig

MODULE = "vllm_lite.server.processes.child_server"
ENGINE, ENGINE_EARLY = "vllm_lite.engine.process", "vllm_lite.engine.process_early"
ERROR_PREFIX = "vllm-lite: "
"""Prefix of the line in which a server prints the error that ends it."""
LOOK_S = 0.02
"""Seconds between two calls of `listens` while a server starts."""


class ChildServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`run_dir` is the private folder, which the server removes if its owner dies first; `output` is an open file
    descriptor."""

    config: ServeConfig
    run_dir: str
    output: int


def socket_path(run_dir: str) -> str:
    return f"{run_dir}/http"


def start(config: ServeConfig, run_dir: str, output: int, name: str, on_end: Callable[[str], None]) -> supervise.Child:
    """Start a server, which listens on the socket of `run_dir`. `on_end` is called on another thread with the reason
    when it has ended. Raises ConfigError if the socket's path is too long."""
    try:
        check_address(f"ipc://{socket_path(run_dir)}")
    except ValueError as error:
        raise ConfigError(f"{error}; set TMPDIR to a shorter folder") from error
    return supervise.spawn(MODULE, ChildServerSettings(config, run_dir, output), name, on_end, fds=(output,))


def listens(run_dir: str) -> bool:
    """Whether the server accepts connections, which it does once it can serve."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(socket_path(run_dir))
        except OSError:
            return False
    return True


def main(settings: ChildServerSettings, stop: Wakeup) -> int:
    """Serve until SIGTERM. Returns the exit status."""
    os.dup2(settings.output, 1)
    os.dup2(settings.output, 2)
    os.close(settings.output)
    if not settings.config.single_process:
        supervise.spawn_early(ENGINE, ENGINE_EARLY)  # its imports run in parallel with those below
    try:
        # Imported here, while the engine's process imports its own modules.
        from vllm_lite.server.processes.serve import serve

        return 0 if stop.is_set() else serve(settings.config)
    except VllmLiteError as error:
        sys.stderr.write(f"{ERROR_PREFIX}{error}\n")
        return 2
    finally:
        supervise.end_early()


if __name__ == "__main__":
    supervise.run_child(
        main, ChildServerSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )
