"""`serve` as a child of the process that uses it: on a socket in a private folder, gone when that process is.

The folder also takes its log, the engine's and the workers', so that the terminal is its owner's alone.
"""

import os
import sys

import msgspec

from vllm_lite.errors import VllmLiteError
from vllm_lite.runtime.supervise import remove_dir, run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.server.config import ServeConfig


class ChildServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`run_dir` is the folder, which dies with the server if its owner dies first."""

    config: ServeConfig
    run_dir: str


def log_path(run_dir: str) -> str:
    return f"{run_dir}/log"


def main(settings: ChildServerSettings, stop: Wakeup) -> int:
    """Serve until SIGTERM. Returns the exit status."""
    file = os.open(log_path(settings.run_dir), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from vllm_lite.server.processes.serve import serve

    if stop.is_set():
        return 0
    try:
        return serve(settings.config)
    except VllmLiteError as error:
        sys.stderr.write(f"vllm-lite: {error}\n")
        return 2


if __name__ == "__main__":
    run_child(main, ChildServerSettings, graceful=True, cleanup=lambda settings: remove_dir(settings.run_dir))
