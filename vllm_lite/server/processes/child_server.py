"""`serve` as a child of the process that uses it: listens on a socket in a private folder, and ends with that process.

The folder also has its log, the engine's and the workers', so that they do not write to the owner's terminal.
"""

import os
import sys

import msgspec

from vllm_lite.errors import VllmLiteError
from vllm_lite.runtime.supervise import remove_dir, run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.server.config import ServeConfig


class ChildServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`run_dir` is the private folder; the server removes it if its owner dies first."""

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
