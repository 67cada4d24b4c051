"""Block-sparse attention patterns, in a module without msgspec, for measuring CUDA kernels where it is missing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """A pattern in which a query attends to its last `local_blocks` sparse blocks and to every `vert_stride`th one,
    shifted from head to head."""

    local_blocks: int
    vert_stride: int
    block_tokens: int
    """Tokens per sparse block, a multiple of the cache's block size."""
    head_step: int = 0
    """Shift from query head to query head; below 0: from KV head to KV head."""
    tp_rank: int = 0
    """The rank's share of the heads: its first head (query or KV heads, as above) is this times the number of its
    heads."""
