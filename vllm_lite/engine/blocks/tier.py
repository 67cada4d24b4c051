"""Tier: where KV blocks are kept beside the device. The host's memory is one; a disk or another machine may be others.

One index serves two uses: blocks of preempted sequences, pinned to them, and cached blocks that the device had no room
for any more, kept until newer ones need the place. A tier decides places; the workers move the bytes. A step's block
program reads and writes the places of blocks that are at hand; those that are not have to be loaded first, while steps
go on. What fails to load is a miss.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Many

AT_HAND = 0
"""Ticket of a load that is not needed."""


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
        """Number of places that can be had, those of cached blocks that nobody pins included."""

    @abstractmethod
    def num_unpinned(self, ids: Iterable[int]) -> int:
        """Number of these blocks that nobody pins: to pin them takes as many of the free places."""

    @abstractmethod
    def find(self, key: bytes) -> int | None:
        """The global id of a block with this content."""

    @abstractmethod
    def reserve(self, keys: Many[bytes | None]) -> list[int]:
        """Global ids of pinned blocks, findable under their keys. Raises OutOfBlocks and takes none if short."""

    @abstractmethod
    def pin(self, ids: Many[int]) -> None:
        """Keep blocks for one sequence more."""

    @abstractmethod
    def unpin(self, ids: Many[int]) -> None:
        """Unpin blocks, last first: a sequence's tail is dropped before its beginning."""

    def begin_load(self, ids: Iterable[int]) -> int:  # noqa: ARG002
        """Start to bring pinned blocks to where a block program can read them. Returns the ticket that poll() will
        return, or AT_HAND if all of them are there."""
        return AT_HAND

    def poll(self) -> Iterable[int]:
        """Tickets of loads that have ended since the last call."""
        return ()

    @abstractmethod
    def num_places(self, keys: Iterable[bytes]) -> int:
        """Number of places that demote() would find for `keys` without a limit."""

    @abstractmethod
    def demote(self, keys: Iterable[bytes], limit: int) -> list[tuple[bytes, int]]:
        """Find places for at most `limit` cached blocks that the device drops: (key, global id), while there is room.

        The first get places first, and are dropped last. A block that is here already takes no place, and counts as
        newly used.
        """

    @abstractmethod
    def forget(self, keys: Iterable[bytes]) -> None:
        """Let these contents be found no more."""

    @abstractmethod
    def reset(self) -> int:
        """Let nothing be found any more. Returns how many blocks could be."""

    @abstractmethod
    def check_integrity(self, pinned: Iterable[Many[int]]) -> None:
        """Raise RuntimeError unless `pinned`, the blocks of each parked sequence, are all that is pinned."""
