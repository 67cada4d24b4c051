"""A waiting sequence's hit in the prefix cache: the blocks and the state to begin with, and when to look again."""

from typing import NamedTuple

from vllm_lite.engine.blocks.state_place import NO_SLOT
from vllm_lite.engine.blocks.verdict import Admission


class PrefixHit(NamedTuple):
    """The cached blocks that a sequence begins with: their global ids per group, null where the window is past."""

    tables: list[list[int]]
    num_tokens: int
    state: int = NO_SLOT
    """The slot with the state behind them, of a model with recurrent layers, or its place on the host."""
    reach: int = 0
    """Number of tokens whose KV is cached: more than `num_tokens` where no state is kept behind them."""
    is_coming: bool = False
    """Whether the state behind more of them is being computed."""


class Lookup(NamedTuple):
    """The result of the last prefix lookup for a waiting sequence, so that not every step has to look again."""

    admission: Admission
    num_cached: int
    next_keys: list[bytes]
    """The key of the next block of the cached prefix, per group."""
    supply: int
    """The pool's free blocks plus those ever revived: admission lacks less only by as much as this grows."""
