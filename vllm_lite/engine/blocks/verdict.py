"""Whether the blocks that a sequence needs may be taken from a pool, with the numbers behind the answer."""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    OK = "fits now"
    LATER = "fits once others have left"
    NEVER = "does not fit into the whole pool"


class Admission(NamedTuple):
    """A verdict with the numbers behind it, all in blocks."""

    verdict: Verdict
    required: int
    free: int
    watermark: int
    total: int
    lacks_state: bool = False
    """Whether it is LATER because no slot is free for the state of recurrent layers, or because a running sequence is
    about to leave the state to begin with."""


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
