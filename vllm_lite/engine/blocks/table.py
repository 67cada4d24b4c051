"""BlockTable: the physical blocks of one sequence in one KV group. It only grows at its end, so that workers receive
diffs; the one exception, copy-on-write of a shared block, has an entry of its own (ReplaceBlock)."""

from vllm_lite.engine.blocks.pool import NULL_BLOCK, BlockPool


class BlockTable:
    """Logical block i, tokens [i * block_size, (i + 1) * block_size), lives in physical block `ids[i]`."""

    __slots__ = ("ids", "num_trimmed", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.ids: list[int] = []
        self.num_trimmed = 0

    def share(self, ids: list[int]) -> None:
        """Append existing blocks, each with one more reference; null blocks stand for those that left the window."""
        self.pool.touch(ids)
        self.ids += ids

    def append(self, count: int) -> list[int]:
        """Append `count` new blocks and return their ids. Raises OutOfBlocks and appends none if too few are free."""
        new = self.pool.get_new_blocks(count)
        self.ids += new
        return new

    def is_shared(self, index: int) -> bool:
        """Whether logical block `index` exists and others may read it: another table holds it, or it is cached."""
        if index >= len(self.ids):
            return False
        block = self.pool.blocks[self.ids[index]]
        return block.ref_count > 1 or block.block_hash is not None

    def copy_on_write(self, index: int) -> tuple[int, int]:
        """Replace a shared block by a new one. Returns (src, dst), which the caller copies. Raises OutOfBlocks."""
        src = self.ids[index]
        (dst,) = self.pool.get_new_blocks(1)
        self.ids[index] = dst
        self.pool.free((src,))
        return src, dst

    def fork(self, num_blocks: int) -> "BlockTable":
        """A table for another sequence that shares the first `num_blocks` blocks."""
        child = BlockTable(self.pool)
        child.share(self.ids[:num_blocks])
        return child

    def trim(self, first_needed: int) -> None:
        """Free the blocks before logical block `first_needed`, which no later token reads."""
        last = min(first_needed, len(self.ids))
        if last > self.num_trimmed:
            dropped = self.ids[self.num_trimmed : last]
            self.ids[self.num_trimmed : last] = [NULL_BLOCK] * len(dropped)
            self.pool.free(reversed(dropped))
            self.num_trimmed = last

    def cut(self, num_blocks: int) -> None:
        """Free the blocks after the first `num_blocks`, last first."""
        self.pool.free(reversed(self.ids[num_blocks:]))
        del self.ids[num_blocks:]

    def free(self) -> None:
        """Free all blocks, last first, so that later ones are evicted before earlier ones."""
        self.pool.free(reversed(self.ids))
        self.ids = []
        self.num_trimmed = 0
