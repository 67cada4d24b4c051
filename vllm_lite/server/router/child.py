"""The entry point of one model's processes: `serve` on a socket in a private folder, which ends with the router.

The router reads the output of the server, its engine and workers, and prints it with the model's name as prefix.
"""

import os
import sys

import msgspec

from vllm_lite.errors import VllmLiteError
from vllm_lite.runtime import supervise
from vllm_lite.runtime.supervise import remove_dir, run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.server.config import ServeConfig

ENGINE, ENGINE_EARLY = "vllm_lite.engine.process", "vllm_lite.engine.process_early"


class ModelServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`run_dir` is the private folder, which the server removes if the router dies first; `output` is an open file
    descriptor."""

    config: ServeConfig
    run_dir: str
    output: int


def main(settings: ModelServerSettings, stop: Wakeup) -> int:
    """Serve until SIGTERM. Returns the exit status."""
    os.dup2(settings.output, 1)
    os.dup2(settings.output, 2)
    os.close(settings.output)
    supervise.spawn_early(ENGINE, ENGINE_EARLY)  # its imports run in parallel with those below
    try:
        # Imported here, while the engine's process imports its own modules.
        from vllm_lite.server.processes.serve import serve

        return 0 if stop.is_set() else serve(settings.config)
    except VllmLiteError as error:
        sys.stderr.write(f"vllm-lite: {error}\n")
        return 2
    finally:
        supervise.end_early()


if __name__ == "__main__":
    run_child(main, ModelServerSettings, graceful=True, cleanup=lambda settings: remove_dir(settings.run_dir))
