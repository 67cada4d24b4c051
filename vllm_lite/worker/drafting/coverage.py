"""Coverage: how far the KV of a model that drafts has been written, block by block.

The engine knows where tokens are computed by the model that verifies. The one that drafts computes them when drafts
are wanted: a sequence that drafts nothing costs it nothing, and what a prefix hit, a fork or a block from the host
brings may lack its KV. So this counts, of each block of its groups, the leading slots whose KV it has written for the
tokens that stand there. A block takes its count along when it is copied or swapped.

A count may only be too low; then tokens are computed once more, with the same result. Two things keep it from being
too high: a step that writes a token lowers it to that slot, and drafts count once they have proved right.
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
        """By block id, those of the host behind those of the device."""

    def move(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Follow a program of block ops. What comes from elsewhere has nothing."""
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
        """The step writes tokens of these rows, from the first one on that is not computed: [num_seqs]."""
        own, size = self._rows, self._block_size
        starts = np.maximum(own.num_computed[rows], own.num_cached[rows])
        blocks, offsets = np.divmod(starts, size)
        for group in self._groups:
            table, lens = own.tables.ids[group], own.tables.lens[rows, group]
            within = blocks < lens
            # A fork and its parent may have a block in common, of which one begins behind the other.
            np.minimum.at(self.num_written, table[rows[within], blocks[within]], offsets[within])
            for row, block, length in zip(rows.tolist(), blocks.tolist(), lens.tolist(), strict=True):
                if block + 1 < length:
                    self.num_written[table[row, block + 1 : length]] = 0
        self.num_written[NULL_BLOCK] = 0

    def of(self, row: int, end: int) -> int:
        """The number of leading positions of a row, at most `end`, whose KV is there."""
        num_blocks = -(-end // self._block_size)
        covered = end
        for group in self._groups:
            counts = self.num_written[self._rows.tables.ids[group][row, :num_blocks]]
            (short,) = (counts < self._block_size).nonzero()
            if len(short):
                covered = min(covered, int(short[0]) * self._block_size + int(counts[short[0]]))
        return covered

    def raise_to(self, row: int, end: int) -> None:
        """The KV of the first `end` positions of a row is there. Those that `of` gave were before."""
        last, offset = divmod(end, self._block_size)
        for group in self._groups:
            ids = self._rows.tables.ids[group][row]
            self.num_written[ids[:last]] = self._block_size
            if offset:
                self.num_written[ids[last]] = max(int(self.num_written[ids[last]]), offset)

    def check(self) -> None:
        """Raise RuntimeError if a count cannot be."""
        counts: NDArray[np.int32] = self.num_written
        if counts[NULL_BLOCK] or counts.min() < 0 or counts.max() > self._block_size:
            raise RuntimeError(f"blocks with {counts.min()} to {counts.max()} of {self._block_size} slots written")
