"""Block-sparse attention patterns. They stand alone because CUDA kernels are also measured where msgspec is missing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """A query sees its last `local_blocks` sparse blocks and, shifted from head to head, every `vert_stride`th one."""

    local_blocks: int
    vert_stride: int
    block_tokens: int
    """Tokens of a sparse block, a multiple of the cache's block size."""
    head_step: int = 0
    """Shift from query head to query head; below 0: from KV head to KV head."""
    tp_rank: int = 0
    """Which share of the heads this is: the first of them, query or KV heads as above, is this times their number."""
