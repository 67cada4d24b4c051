"""The block tables of the batch's rows: the ids of each sequence's KV blocks, one table per KV group."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.step import BlockIds, Handle
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK


class BlockTables:
    """Arrays with one table per row. Entries past a table's length are undefined."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        windows: Sequence[int | None],  # per KV group, None = full attention
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.windows = tuple(windows)
        self.max_model_len = max_model_len
        self.ids = [np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32) for _ in windows]
        self.lens = np.zeros((max_num_seqs, len(self.windows)), np.int32)
        self.highest_block = 0
        """Highest block id that any table has held so far."""

    def append(self, row: int, handle: Handle, block_ids: BlockIds) -> None:
        """Append blocks to each group's table of `row`. Raises ProtocolError, naming the handle, if they do not fit."""
        if not block_ids:
            return
        if len(block_ids) != len(self.ids):
            raise ProtocolError(f"handle {handle} got blocks for {len(block_ids)} KV groups of {len(self.ids)}")
        for group, ids in enumerate(block_ids):
            if not ids:
                continue
            table, start = self.ids[group], int(self.lens[row, group])
            end = start + len(ids)
            if end > table.shape[1]:
                raise ProtocolError(f"handle {handle} got {end} blocks, at most {table.shape[1]} are needed")
            self._check(handle, ids)
            table[row, start:end] = ids
            self.lens[row, group] = end

    def replace(self, row: int, handle: Handle, place: tuple[int, int], block_id: int) -> None:
        """Replace the block at `place`, (group, index)."""
        group, index = place
        if not (0 <= group < len(self.windows) and 0 <= index < self.lens[row, group]):
            raise ProtocolError(
                f"ReplaceBlock of entry {index} of group {group} of handle {handle}, "
                f"whose tables hold {self.lens[row].tolist()}"
            )
        self._check(handle, [block_id])
        self.ids[group][row, index] = block_id

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Copy to row `child` the tables of row `parent`, up to the blocks of the first `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        for table in self.ids:
            table[child, :num_blocks] = table[parent, :num_blocks]
        self.lens[child] = np.minimum(self.lens[parent], num_blocks)

    def move(self, source: int, target: int) -> None:
        """Copy the tables of row `source` to row `target`."""
        for table, length in zip(self.ids, self.lens[source], strict=True):
            table[target, :length] = table[source, :length]
        self.lens[target] = self.lens[source]

    def _check(self, handle: Handle, ids: list[int]) -> None:
        highest = max(ids)
        if min(ids) < 0 or highest >= self.num_blocks:
            raise ProtocolError(f"handle {handle} got blocks {ids}, the pool is [0, {self.num_blocks})")
        self.highest_block = max(self.highest_block, highest)

    # ---- a step

    def room(self, rows: Int64s) -> Int32s:  # [num_seqs]
        """Number of tokens that the blocks of each row hold."""
        lens = self.lens[rows]  # [num_seqs, num_groups]
        least = lens[:, 0] if lens.shape[1] == 1 else np.minimum.reduce(lens, axis=1, initial=self.max_model_len)
        found: Int32s = least * self.block_size
        return found

    def of(self, rows: Int64s) -> tuple[Int32s, ...]:  # per KV group: [num_seqs, the longest of these tables]
        widths = np.maximum.reduce(self.lens[rows], axis=0, initial=0).tolist()
        return tuple(table[rows, :width] for table, width in zip(self.ids, widths, strict=True))

    def slots(
        self,
        rows: Int64s,  # [num_tokens]
        positions: Int64s,  # [num_tokens]
        written: NDArray[np.bool_],  # [num_tokens]
        handle_of: Callable[[int], Handle],  # of a row, for the error
        groups: Sequence[int] | None = None,
    ) -> tuple[Int64s, ...]:
        """Slot of each token (block id * block size + offset, or PAD_SLOT if it is not written), per KV group of
        `groups` (None: all): [num_tokens]. Raises ProtocolError for a token that would be written to the null block."""
        if not self.ids:
            return ()
        block_index, offsets = np.divmod(positions, self.block_size)
        slots = []
        for table in self.ids if groups is None else [self.ids[group] for group in groups]:
            blocks = table[rows, block_index]
            lost = written & (blocks == NULL_BLOCK)
            if lost.any():
                raise ProtocolError(f"handle {handle_of(int(rows[lost.argmax()]))} would write to the null block")
            slots.append(np.where(written, blocks * np.int64(self.block_size) + offsets, PAD_SLOT))
        return tuple(slots)

    # ---- integrity

    def problems(self, row: int, num_computed: int) -> Iterator[str]:
        """Inconsistencies in the tables of a row with `num_computed` computed tokens."""
        for group, table in enumerate(self.ids):
            window, blocks = self.windows[group], table[row, : self.lens[row, group]]
            # The engine frees blocks before the window without a message, and may allocate them to others.
            first = 0 if window is None else max(0, num_computed - window + 1) // self.block_size
            if len(blocks) * self.block_size < num_computed or not self.is_table(blocks[first:]):
                yield f"blocks of group {group} lack some of {num_computed} tokens, repeat or are not blocks: {blocks}"

    def is_table(self, ids: Int32s) -> bool:
        """Whether `ids` can be a block table: all are in the pool, and none but the null block occurs twice."""
        real = ids[ids != NULL_BLOCK]
        return len(set(real.tolist())) == len(real) and bool(((real > 0) & (real < self.num_blocks)).all())
