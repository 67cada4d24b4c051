"""BlockTable: which physical blocks hold one sequence's KV in one group. Append-only, so that workers receive diffs."""

from vllm_lite.engine.block_pool import BlockPool


class BlockTable:
    """Logical block i, tokens [i * block_size, (i + 1) * block_size), lives in physical block `ids[i]`."""

    __slots__ = ("ids", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.ids: list[int] = []

    def share(self, ids: list[int]) -> None:
        """Append blocks that are cached: each gets one more reference."""
        self.pool.touch(ids)
        self.ids += ids

    def append(self, count: int) -> list[int]:
        """Append `count` new blocks and return their ids. Raises OutOfBlocks and appends none if too few are free."""
        new = self.pool.get_new_blocks(count)
        self.ids += new
        return new

    def fork(self) -> "BlockTable":
        """A table of the same blocks for another sequence; needs no memory."""
        child = BlockTable(self.pool)
        child.share(self.ids)
        return child

    def free(self) -> None:
        """Give all blocks back, last first, so that tails are evicted before prefixes."""
        self.pool.free(reversed(self.ids))
        self.ids = []
