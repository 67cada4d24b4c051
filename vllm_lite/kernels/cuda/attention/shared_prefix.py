"""Finds splits shared by rows of a step, and makes the lists with which they are read once for several rows.

Rows share a split if their contexts are split alike, they attend to all of it, and it is in the same blocks. This holds
for sequences with a common prefix, through the prefix cache or a fork, at several levels: a system prompt of all, then
the conversation of some; and for the rows of a draft. `csrc/cuda/cascade_attention.cuh` computes such splits, with the
same bits for a row as alone.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cuda.attention.attention_work import (
    TILE,
    Cascade,
    Int32s,
    Ints,
    RowWork,
    SplitList,
    num_splits,
    split_list,
    tiles_a_split,
)


class Worth(NamedTuple):
    """Thresholds for the additional launch. Few rows do not fill a GPU, and read shared data from its L2 cache at the
    same time. Not measured on a device."""

    tokens: int = 1024
    """Minimum number of shared tokens."""
    rows: int = 8
    """Minimum number of rows longer than `tokens`."""
    saved_blocks: int = 512
    """Minimum number of saved thread blocks, about the number of concurrent ones."""


WORTH = Worth()


class CascadeLists(NamedTuple):
    """Work lists of a step's decodes with shared splits, on the host."""

    splits: Int32s  # [1 + n, 4], as `split_list`: a row's own splits, at least its last one; begins with (n, m)
    shared: Int32s  # [m, 4]: sequence, split, tokens seen by the first row, 16 * first row + number of rows - 1
    firsts: Int32s  # [n], for each of `splits`, the index of its row's first split among those of all rows
    rows: Int32s  # [r, 2]: token, index of its first split; rows that share splits are adjacent
    num_parts: int
    """Number of splits of all rows."""

    @property
    def parts(self) -> tuple[Int32s, ...]:
        return self[:4]

    def among(self, parts: Iterator[torch.Tensor]) -> SplitList:
        """The lists on the device, from their copies, which come next in `parts`."""
        splits, *others = islice(parts, 4)
        return SplitList(splits, True, Cascade(*others), self.num_parts)

    def on(self, device: torch.device) -> SplitList:
        return self.among(torch.from_numpy(part).to(device) for part in self.parts)


def cascade_lists(  # noqa: PLR0913 - what comes last is for tests
    rows: RowWork,
    tables: Ints,  # [num_seqs, any], block ids
    block_size: int,
    most_rows: int,
    num_kv_heads: int,
    *,
    worth: Worth | None = None,
    split_tokens: int = 0,
) -> CascadeLists | None:
    """The lists of rows without a window; up to `most_rows` rows share a block. None if it does not pay off."""
    worth = worth or WORTH
    found = _alike(rows, tables, block_size, worth, split_tokens)
    if found is None:
        return None
    order, common = found
    shared, num_saved = _items(common, rows.seen[order], rows.sequences[order], most_rows)
    if num_saved * num_kv_heads < worth.saved_blocks:
        return None
    skipped = np.zeros(len(rows.seen), np.int64)
    skipped[order[1:]] = common
    skipped[order[:-1]] = np.maximum(skipped[order[:-1]], common)
    counts = np.maximum(num_splits(rows.seen, None, split_tokens), 1)
    places = np.cumsum(counts) - counts
    splits = split_list(rows, None, split_tokens, skipped)
    splits[0, 1] = len(shared)
    firsts = np.repeat(places, counts - skipped).astype(np.int32)
    members = np.stack((rows.tokens[order], places[order]), 1).astype(np.int32)
    return CascadeLists(splits, shared, firsts, members, int(counts.sum()))


def _alike(
    rows: RowWork, tables: Ints, block_size: int, worth: Worth, split_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Rows sorted so that rows with a common prefix are adjacent, and the number of splits that each shares with the
    previous one, [n - 1]. None if there are no such rows."""
    chosen = np.flatnonzero(rows.seen > worth.tokens)
    if len(chosen) < worth.rows:
        return None
    seen, sequences = rows.seen[chosen], rows.sequences[chosen]
    tokens = np.full(len(seen), split_tokens) if split_tokens else TILE * tiles_a_split(-(-seen // TILE))
    key = tokens.astype(np.int64) << 32 | tables[sequences, -(-worth.tokens // block_size) - 1]
    by_key = np.argsort(key, kind="stable")
    again = key[by_key[1:]] == key[by_key[:-1]]
    if not again.any():
        return None
    own = np.zeros(len(key), bool)
    own[1:] = again
    own[:-1] |= again
    chosen = chosen[by_key[own]]
    seen, sequences, tokens, key = (part[by_key[own]] for part in (seen, sequences, tokens, key))

    whole = (seen - 1) // tokens  # whole splits, without the last one, which is never shared
    ends = -(-(np.arange(int(whole.max())) + 1) * tokens[:, None] // block_size) - 1  # last block of each split
    there = np.arange(ends.shape[1]) < whole[:, None]
    last = tables[sequences[:, None], np.where(there, ends, 0)] * there
    text = np.ascontiguousarray(np.concatenate((key.view(np.int32).reshape(-1, 2), last), 1, dtype=np.int32))
    order = np.argsort(text.view(f"S{text.itemsize * text.shape[1]}").ravel(), kind="stable")
    seen, tokens, whole = seen[order], tokens[order], whole[order]

    width = int((ends * there).max()) + 1
    blocks = tables[sequences[order], :width]
    equal = blocks[1:] == blocks[:-1]
    num_equal = np.where(equal.all(1), width, equal.argmin(1))
    common = np.minimum(num_equal * block_size // tokens[1:], np.minimum(whole[1:], whole[:-1]))
    common[(tokens[1:] != tokens[:-1]) | (common * tokens[1:] < worth.tokens)] = 0
    return chosen[order], common


def _items(common: NDArray[np.int64], seen: Ints, sequences: Ints, most_rows: int) -> tuple[Int32s, int]:
    """The list of shared splits, [m, 4], and the number of splits it saves."""
    shares = np.zeros((int(common.max(initial=0)), len(common) + 2), bool)  # [split, row]: shared with the previous row
    shares[:, 1:-1] = common > np.arange(len(shares))[:, None]
    split, start = np.nonzero(shares[:, 1:] & ~shares[:, :-1])
    _, end = np.nonzero(shares[:, :-1] & ~shares[:, 1:])
    length = end - start + 1
    num_items = -(-length // most_rows)
    run = np.repeat(np.arange(len(start)), num_items)
    place = np.arange(len(run)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    first = start[run] + place * length[run] // num_items[run]
    past = start[run] + (place + 1) * length[run] // num_items[run]
    items = np.stack((sequences[first], split[run], seen[first], 16 * first + past - first - 1), 1).astype(np.int32)
    return items, int(length.sum()) - len(run)
