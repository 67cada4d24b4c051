"""Verdicts of admission: whether a pool has the blocks that a sequence needs, with the numbers behind the answer."""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    OK = "fits now"
    LATER = "fits once others have left, or what it lacks has arrived"
    NEVER = "does not fit into the whole pool"


class Admission(NamedTuple):
    """A verdict with its numbers, all in blocks of the manager's first part."""

    verdict: Verdict
    required: int = 0
    free: int = 0
    watermark: int = 0
    total: int = 0
    lacks: str = "blocks"
    """If LATER: name of the resource that the sequence waits for."""
    is_arriving: bool = False
    """Whether that resource is in transfer, so that no other sequence has to end first."""

    def unless(self, other: "Admission") -> "Admission":
        """This verdict, or if it is OK that of `other`, with the numbers of this one."""
        if self.verdict is not Verdict.OK or other.verdict is Verdict.OK:
            return self
        return self._replace(verdict=other.verdict, lacks=other.lacks, is_arriving=other.is_arriving)


OK = Admission(Verdict.OK)
"""Verdict of a part that never lacks room."""


class Lookup(NamedTuple):
    """Result of the latest prefix lookup for a waiting sequence, stored so that steps need not repeat it."""

    admission: Admission
    num_cached: int
    next_keys: list[bytes]
    """Key per group of the first block after the cached prefix."""
    supply: int
    """`CachePart.supply` at the time of the lookup: the sequence can lack fewer blocks only by as much as it grows."""


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
