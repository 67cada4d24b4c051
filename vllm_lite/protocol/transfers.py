"""Engine <-> worker: transfers of KV blocks, recurrent states and media vectors between memory and the disk tier.

The engine names contents by keys, and places in the pools by ids. The key of a block ends with its group, that of a
state with STATE, and that of a medium's vectors, which workers find by the medium's digest, with MEDIUM. A worker runs
the steps that were sent before a transfer first, then moves the bytes beside later steps, and answers each transfer
once. Paths are not on the wire: only the worker knows how the contents are stored.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message
from vllm_lite.protocol.encoder import Digest

STATE = b"state"
"""Suffix of a state's key; the ids of such keys are state slots."""
MEDIUM = b"media"
"""Suffix of the key of a medium's vectors."""
Key = Annotated[bytes, Meta(max_length=64)]
Ticket = int


class LoadBlocks(Message, tag=45):
    """Fill the blocks or slots `ids` with the contents of `keys`. No step reads or writes them meanwhile."""

    ticket: Ticket
    keys: list[Key]
    ids: list[int]


class StoreBlocks(Message, tag=46):
    """Store the contents of the blocks or slots `ids`: consecutive blocks of one hash chain and group, or states. No
    step writes them meanwhile."""

    ticket: Ticket
    keys: list[Key]
    ids: list[int]


class LoadEncoded(Message, tag=50):
    """Load the vectors of a medium, as if they had been computed."""

    ticket: Ticket
    key: Key
    digest: Digest
    num_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    grid: tuple[int, ...] = ()


class StoreEncoded(Message, tag=51):
    """Store the vectors of a medium, after its Encode."""

    ticket: Ticket
    key: Key
    digest: Digest


class ForgetStored(Message, tag=47):
    """Remove these keys from the tier; None: all keys of this model."""

    keys: list[Key] | None = None


class Transferred(Message, tag=48):
    """A transfer has ended. `failed` are the indices of keys that could not be moved; after a load the contents of
    their blocks or slots are undefined. `took_s` is its time in seconds, waiting included."""

    rank: int
    generation: int
    ticket: Ticket
    failed: tuple[int, ...] = ()
    num_bytes: int = 0
    took_s: float = 0.0


class TierUsage(Message):
    """Counts since the worker's start; `num_bytes` is the present size of the tier, of all engines that share it."""

    num_bytes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    num_queued: int = 0
    """Transfers that have not ended."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Reason -> number of failed reads and writes, and of dropped contents."""


class StoredKeys(Message, tag=49):
    """Keys that the tier has gained or lost; sent by rank 0, first after the start."""

    rank: int
    generation: int
    added: list[Key]
    removed: list[Key]
    usage: TierUsage = TierUsage()


Transfer = LoadBlocks | StoreBlocks | LoadEncoded | StoreEncoded | ForgetStored
TransferAnswer = Transferred | StoredKeys
