"""Coverage: counts the slots of each block for which a drafting model has written its KV.

The engine knows which tokens the verifying model has computed. The drafting model computes tokens only when drafts are
wanted: a sequence without drafts costs it nothing, and blocks from a prefix hit, a fork or the host may lack its KV. So
Coverage counts, for each block of its groups, the leading slots whose KV the drafting model has written for the current
tokens. A block keeps its count when it is copied or swapped.

A count may be too low; then tokens are computed again, with the same result. It must not be too high, so a step that
writes a token lowers the count to that slot, and drafts count only after they were accepted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.step import BlockOp
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int64s
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK

BETWEEN_BLOCKS = (BlockOp.COPY, BlockOp.SWAP_OUT, BlockOp.SWAP_IN)
BETWEEN_STATES = (BlockOp.STATE_OUT, BlockOp.STATE_IN)


class Coverage:
    """Counts for the blocks of the KV `groups` of the batch `rows`."""

    def __init__(self, rows: Rows, groups: Sequence[int]) -> None:
        self._rows = rows
        self._groups = tuple(dict.fromkeys(groups))
        self._block_size = rows.tables.block_size
        self.num_written = np.zeros(rows.tables.num_blocks, np.int32)
        """Counts by block id; host blocks follow those of the device."""

    def move(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Apply a program of block ops to the counts. Blocks that come from elsewhere get 0."""
        for op, source, target in block_ops:
            if op in BETWEEN_STATES:
                continue
            self._make_room(max(source, target))
            self.num_written[target] = self.num_written[source] if op in BETWEEN_BLOCKS else 0

    def _make_room(self, block_id: int) -> None:
        if block_id >= len(self.num_written):
            more = np.zeros(max(block_id + 1, 2 * len(self.num_written)), np.int32)
            more[: len(self.num_written)] = self.num_written
            self.num_written = more

    def lower(self, rows: Int64s) -> None:
        """Lower the counts of `rows`, [num_seqs], whose tokens a step writes from the first uncomputed one on."""
        own, size = self._rows, self._block_size
        starts = np.maximum(own.num_computed[rows], own.num_cached[rows])
        blocks, offsets = np.divmod(starts, size)
        for group in self._groups:
            table, lens = own.tables.ids[group], own.tables.lens[rows, group]
            within = blocks < lens
            # A fork and its parent may share a block and begin at different slots of it.
            np.minimum.at(self.num_written, table[rows[within], blocks[within]], offsets[within])
            for row, block, length in zip(rows.tolist(), blocks.tolist(), lens.tolist(), strict=True):
                if block + 1 < length:
                    self.num_written[table[row, block + 1 : length]] = 0
        self.num_written[NULL_BLOCK] = 0

    def of(self, row: int, end: int) -> int:
        """The number of leading positions of a row, at most `end`, whose KV is written."""
        num_blocks = -(-end // self._block_size)
        covered = end
        for group in self._groups:
            counts = self.num_written[self._rows.tables.ids[group][row, :num_blocks]]
            (short,) = (counts < self._block_size).nonzero()
            if len(short):
                covered = min(covered, int(short[0]) * self._block_size + int(counts[short[0]]))
        return covered

    def raise_to(self, row: int, end: int) -> None:
        """Record that the KV of the first `end` positions of a row is written; `of` returned the number before."""
        last, offset = divmod(end, self._block_size)
        for group in self._groups:
            ids = self._rows.tables.ids[group][row]
            self.num_written[ids[:last]] = self._block_size
            if offset:
                self.num_written[ids[last]] = max(int(self.num_written[ids[last]]), offset)

    def check(self) -> None:
        """Raise RuntimeError if a count is impossible."""
        counts: NDArray[np.int32] = self.num_written
        if counts[NULL_BLOCK] or counts.min() < 0 or counts.max() > self._block_size:
            raise RuntimeError(f"blocks with {counts.min()} to {counts.max()} of {self._block_size} slots written")
