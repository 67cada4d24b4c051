"""KeptState: the paused or sleeping state of an engine and its weights, in a file for the engine that replaces it."""

import os
from pathlib import Path

import msgspec

from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.operations import PauseGeneration, Sleep
from vllm_lite.runtime import log

FILE = "operations"

logger = log.get(__name__)


class KeptState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model` is the folder whose weights are served. `ready` and the numbers of blocks are only set while the engine
    is asleep and has no workers to report them. `asked` is a pause or sleep that was still waiting for requests to
    end."""

    model: str
    is_paused: bool = False
    sleep_level: int | None = None
    ready: Ready | None = None
    num_blocks: int = 0
    num_host_blocks: int = 0
    asked: PauseGeneration | Sleep | None = None


def keep(run_dir: str, state: KeptState) -> None:
    """Replace the file. If that fails, the engine continues and logs a warning."""
    path = Path(run_dir) / FILE
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.msgpack.encode(state))
        os.replace(new, path)
    except OSError as error:
        logger.warning("an engine that replaces this one will not know of this operation: %s", error)


def kept(run_dir: str) -> KeptState | None:
    """The state that an earlier engine has kept; None if there is none, or if it cannot be read, which is logged."""
    try:
        return msgspec.msgpack.decode((Path(run_dir) / FILE).read_bytes(), type=KeptState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.error(
            "this engine serves, and with the weights of its start, whatever the one before was asked for: %s/%s "
            "cannot be read: %s",
            run_dir,
            FILE,
            error,
        )
        return None
