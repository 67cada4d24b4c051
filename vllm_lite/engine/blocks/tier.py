"""Tier: an interface for storage of KV blocks beside the device, such as host memory.

One index serves two uses: blocks of preempted sequences, which are pinned, and demoted cached blocks, which are kept
until newer ones need the room. A tier chooses places; the workers move the bytes. Block ops of a step can read and
write places that are at hand; others have to be loaded first, while steps go on. A failed load is a cache miss.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Many

AT_HAND = 0
"""Ticket of begin_load() if no load is needed."""


class Tier(ABC):
    """Ids are global: those of a tier begin at `first_id`, above those of the device."""

    first_id: int

    @property
    @abstractmethod
    def num_usable(self) -> int:
        """Number of places."""

    @property
    @abstractmethod
    def num_used(self) -> int:
        """Number of places that are pinned."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Number of places that can be reserved, those of unpinned cached blocks included."""

    @abstractmethod
    def num_unpinned(self, ids: Iterable[int]) -> int:
        """Number of unpinned blocks in `ids`: pinning them takes as many of the free places."""

    @abstractmethod
    def find(self, key: bytes) -> int | None:
        """Global id of a block with the content of `key`, or None."""

    @abstractmethod
    def reserve(self, keys: Many[bytes | None]) -> list[int]:
        """Allocate pinned blocks, cached under their keys (None: not cached). Returns global ids. Raises OutOfBlocks
        and takes none if too few are free."""

    @abstractmethod
    def pin(self, ids: Many[int]) -> None:
        """Add one pin to each block."""

    @abstractmethod
    def unpin(self, ids: Many[int]) -> None:
        """Drop one pin of each block, last first, so that a sequence's end is evicted before its beginning."""

    def begin_load(self, ids: Iterable[int]) -> int:  # noqa: ARG002
        """Start to make pinned blocks readable by block ops. Returns a ticket, which poll() returns when the load has
        ended, or AT_HAND if no load is needed."""
        return AT_HAND

    def poll(self) -> Iterable[int]:
        """Tickets of loads that have ended since the last call."""
        return ()

    @abstractmethod
    def num_places(self, keys: Iterable[bytes]) -> int:
        """Number of places that demote() would allocate for `keys` without a limit."""

    @abstractmethod
    def demote(self, keys: Iterable[bytes], limit: int) -> list[tuple[bytes, int]]:
        """Allocate places for at most `limit` cached blocks that the device drops, as long as there is room. Returns
        (key, global id) of each.

        The first keys get places first, and are evicted last. A block that is here already takes no new place, and
        counts as just used.
        """

    @abstractmethod
    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove these keys from the index."""

    @abstractmethod
    def reset(self) -> int:
        """Empty the index. Returns the number of blocks that it had."""

    @abstractmethod
    def check_integrity(self, pinned: Iterable[Many[int]]) -> None:
        """Raise RuntimeError unless `pinned`, the blocks of each parked sequence, are all that is pinned."""
