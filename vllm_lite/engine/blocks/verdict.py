"""Whether what a sequence needs may be taken from a pool, with the numbers behind the answer."""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    OK = "fits now"
    LATER = "fits once others have left, or what it lacks has arrived"
    NEVER = "does not fit into the whole pool"


class Admission(NamedTuple):
    """A verdict with the numbers behind it, all in blocks of the manager's first part."""

    verdict: Verdict
    required: int = 0
    free: int = 0
    watermark: int = 0
    total: int = 0
    lacks: str = "blocks"
    """If LATER: the kind of thing that the sequence waits for."""
    is_arriving: bool = False
    """Whether that is on its way, so that the sequence need not wait until others have left."""

    def unless(self, other: "Admission") -> "Admission":
        """Return this verdict, or where it is OK that of another part, with the numbers of this one."""
        if self.verdict is not Verdict.OK or other.verdict is Verdict.OK:
            return self
        return self._replace(verdict=other.verdict, lacks=other.lacks, is_arriving=other.is_arriving)


OK = Admission(Verdict.OK)
"""Verdict of a part that has room whatever comes."""


class Lookup(NamedTuple):
    """The result of the last prefix lookup for a waiting sequence, so that not every step has to look again."""

    admission: Admission
    num_cached: int
    next_keys: list[bytes]
    """The key of the next block of the cached prefix, per group."""
    supply: int
    """The pool's free blocks plus those ever revived: admission lacks less only by as much as this grows."""


def admission(total: int, free: int, required: int, watermark: int) -> Admission:
    """Whether `required` blocks may be taken from a pool of `total` of which `free` are free.

    The watermark keeps room for running sequences to grow; it holds for admission only.
    """
    if total - required < watermark:
        verdict = Verdict.NEVER
    elif free - required >= watermark:
        verdict = Verdict.OK
    else:
        verdict = Verdict.LATER
    return Admission(verdict, required, free, watermark, total)
