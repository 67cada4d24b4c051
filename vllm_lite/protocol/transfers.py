"""Engine <-> worker: KV blocks, recurrent states and vectors of media on their way between memory and a tier below it.

The engine names contents by their keys, and places in the pools by ids: a key of a block ends in its group, that of a
state in STATE, that of a medium's vectors, which a worker has by the medium's digest, in MEDIUM. A worker executes the
steps that were sent before a transfer first, then moves the bytes beside the steps that follow, and answers each
transfer once. No path is in here: a file, or a service, is the worker's matter.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message
from vllm_lite.protocol.encoder import Digest

STATE = b"state"
"""Ends the key of a state; ids beside such keys are slots."""
MEDIUM = b"media"
"""Ends the key of the vectors of a medium."""
Key = Annotated[bytes, Meta(max_length=64)]
Ticket = int


class LoadBlocks(Message, tag=45):
    """Fill the places `ids` with the contents of `keys`. No step reads or writes them meanwhile."""

    ticket: Ticket
    keys: list[Key]
    ids: list[int]


class StoreBlocks(Message, tag=46):
    """Keep the contents of the places `ids`: consecutive blocks of one chain and group, or states. No step writes them
    meanwhile."""

    ticket: Ticket
    keys: list[Key]
    ids: list[int]


class LoadEncoded(Message, tag=50):
    """Have the vectors of a medium from the tier, as if they had been computed."""

    ticket: Ticket
    key: Key
    digest: Digest
    num_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    grid: tuple[int, ...] = ()


class StoreEncoded(Message, tag=51):
    """Keep the vectors of a medium, which an Encode before has asked for."""

    ticket: Ticket
    key: Key
    digest: Digest


class ForgetStored(Message, tag=47):
    """Let these contents be found no more; None: nothing that is kept of this model."""

    keys: list[Key] | None = None


class Transferred(Message, tag=48):
    """A transfer has ended, but for those of its keys whose places are in `failed`: after a load their places may hold
    anything. It took `took_s`, waiting included."""

    rank: int
    generation: int
    ticket: Ticket
    failed: tuple[int, ...] = ()
    num_bytes: int = 0
    took_s: float = 0.0


class TierUsage(Message):
    """Counts since the worker's start, but for `num_bytes`, which are held now by all engines that share the tier."""

    num_bytes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    num_queued: int = 0
    """Transfers that are not done yet."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Reads and writes that were refused, and contents that were dropped, by reason."""


class StoredKeys(Message, tag=49):
    """Contents that can be loaded from now on, or no more; by rank 0. The first ones come after the start."""

    rank: int
    generation: int
    added: list[Key]
    removed: list[Key]
    usage: TierUsage = TierUsage()


Transfer = LoadBlocks | StoreBlocks | LoadEncoded | StoreEncoded | ForgetStored
TransferAnswer = Transferred | StoredKeys
