"""State of an engine after its operations, kept in a file for the one that takes its place if it dies."""

import os
from pathlib import Path

import msgspec

from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.operations import PauseGeneration, Sleep
from vllm_lite.runtime import log

FILE = "operations"

logger = log.get(__name__)


class KeptState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model` is the folder whose weights are served. An engine that is asleep has no workers that could say what
    `ready` says, and how many blocks its pools have. `asked` is a pause or a sleep that was under way: it still waited
    for requests to end."""

    model: str
    is_paused: bool = False
    sleep_level: int | None = None
    ready: Ready | None = None
    num_blocks: int = 0
    num_host_blocks: int = 0
    asked: PauseGeneration | Sleep | None = None


def keep(run_dir: str, state: KeptState) -> None:
    """Write the file anew. Where that is impossible the engine goes on, and the log says what is lost."""
    path = Path(run_dir) / FILE
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.msgpack.encode(state))
        os.replace(new, path)
    except OSError as error:
        logger.warning("an engine that takes the place of this one will not know of this operation: %s", error)


def kept(run_dir: str) -> KeptState | None:
    """State that an earlier engine has kept; None if there is none, or if it cannot be read, which the log says."""
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
