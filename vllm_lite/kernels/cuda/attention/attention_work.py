"""Work lists of a step's attention, made on the host from the lengths of sequences.

A list has only entries with work, so a grid of its length has no empty blocks, however different the sequences are.
`csrc/cuda/merge_splits.cuh` defines the layout of entries, and splits a row's context as `num_splits` here. The splits
of a row depend only on the tokens it attends to and the window, not on the batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cuda.launcher import require

Ints: TypeAlias = NDArray[np.integer[Any]]
Int32s: TypeAlias = NDArray[np.int32]

TILE = 16
"""Tokens that a warp of the decode kernel processes at once."""
MAX_SPLITS = 64
"""Maximum splits of a sequence: enough to fill a GPU with one sequence of 8 KV heads; more would only need
workspace."""
PREFILL_ROWS = 64
"""Query rows of a block of the prefill kernel: (token, query head of the KV head's group)."""
MAX_SHORT_ROWS = 16
SHORT_TOKENS = 512
MAX_SHORT_SPLITS = 2048
"""Chunks of a few rows after a long context (drafts, the end of a prompt) are computed by the decode kernel, row by
row, while there are few: the prefill kernel would process their context with one block per KV head. Each row reads the
context again, mostly from the L2 cache, so chunks that fill the GPU anyway stay with the prefill kernel."""


_NONE = np.zeros(1, np.int64)


class RowWork(NamedTuple):
    """Rows for the decode kernel. A row that attends to nothing becomes zero."""

    tokens: Ints  # [n], index in the step
    sequences: Ints  # [n]
    seen: Ints  # [n], position + 1; 0 for padding


class Cascade(NamedTuple):
    """Splits shared by several rows, in device memory; see shared_prefix.CascadeLists."""

    shared: torch.Tensor  # int32 [most shared splits, 4]
    firsts: torch.Tensor  # int32 [most splits]
    rows: torch.Tensor  # int32 [most rows, 2]


class SplitList(NamedTuple):
    """The decode kernel's work list in device memory. Its first entry has its length and that of `cascade.shared`."""

    splits: torch.Tensor  # int32 [1 + most splits, 4]: token, sequence, tokens seen, split; a row's are adjacent
    several: bool
    """Whether a row may have more than one split."""
    cascade: Cascade | None = None
    """The splits shared by rows, which are then not in `splits`."""
    num_parts: int | None = None
    """Maximum number of splits of all rows; None: of those in `splits`."""

    @property
    def most_splits(self) -> int:
        """Maximum number of splits, including shared ones."""
        return len(self.splits) - 1 if self.num_parts is None else self.num_parts

    @classmethod
    def on(cls, device: torch.device, rows: RowWork, window: int | None = None, split_tokens: int = 0) -> "SplitList":
        """A list of exactly this work."""
        splits = split_list(rows, window, split_tokens)
        return cls(torch.from_numpy(splits).to(device), has_several(splits))


def tiles_a_split(tiles: Ints) -> Ints:
    """As the function of the same name in merge_splits.cuh."""
    large = np.maximum(32, -(-tiles // MAX_SPLITS))
    return np.where(tiles <= 32, 32, np.where(tiles <= 256, 16, large))


def num_splits(seen: Ints, window: int | None = None, split_tokens: int = 0) -> Ints:
    """Number of splits of rows that attend to `seen` tokens, 0 for none. `split_tokens`: fixed tokens per split; 0: by
    length."""
    tiles = -(-seen // TILE)
    if window is not None:
        tiles = tiles - np.maximum(seen - window, 0) // TILE
    return -(-tiles // (split_tokens // TILE or tiles_a_split(tiles)))


def most_splits(max_seq_len: int, window: int | None = None) -> int:
    """Maximum number of splits of a row that attends to up to `max_seq_len` tokens."""
    seen = max_seq_len if window is None else min(max_seq_len, window + 2 * TILE - 2)  # it may begin and end in a tile
    peaks = [256 * TILE, 32 * MAX_SPLITS * TILE]  # there splits become larger
    return int(num_splits(np.array([seen, *(min(seen, peak) for peak in peaks)])).max())


def short_chunks(
    query_lens: Ints, seq_lens: Ints, windows: Sequence[int | None] = (None,)
) -> NDArray[np.bool_]:  # [num_seqs]
    """Mask of the sequences with more than one row that are computed by the decode kernel."""
    short = (query_lens > 1) & (query_lens <= MAX_SHORT_ROWS) & (seq_lens > SHORT_TOKENS)
    most = max((num_splits(seq_lens, window) * query_lens)[short].sum() for window in windows) if short.any() else 0
    if most > MAX_SHORT_SPLITS:
        short[:] = False
    return short


def rows_of(query_lens: Ints, seq_lens: Ints, num_tokens: int, chosen: NDArray[np.bool_]) -> RowWork:
    """The rows of the chosen sequences, and the padding after the last sequence."""
    ends = np.cumsum(query_lens)
    sequences = np.repeat(np.flatnonzero(chosen), query_lens[chosen])
    before = np.cumsum(query_lens * chosen) - query_lens * chosen
    place = np.arange(len(sequences)) - before[sequences]  # index of a row in its sequence
    from_end = query_lens[sequences] - place
    tokens = ends[sequences] - from_end
    seen = np.maximum(seq_lens[sequences] - from_end + 1, 0)
    num_used = int(ends[-1]) if len(ends) else 0
    if num_used == num_tokens:
        return RowWork(tokens, sequences, seen)
    padding = np.arange(num_used, num_tokens)
    none = np.zeros_like(padding)
    return RowWork(*map(np.concatenate, ((tokens, padding), (sequences, none), (seen, none))))


def split_list(rows: RowWork, window: int | None, split_tokens: int = 0, skipped: Ints = _NONE) -> Int32s:
    """The list of splits, [1 + n, 4], without the first `skipped` of each row, and without shared splits."""
    counts = num_splits(rows.seen, window, split_tokens)
    own = np.maximum(counts, 1) - skipped  # a row without keys has an entry, too, to be zeroed
    first = np.cumsum(own) - own
    num_entries = int(own.sum())
    of = np.repeat(np.arange(len(own)), own)
    splits = np.empty((1 + num_entries, 4), np.int32)
    splits[0] = num_entries, 0, 0, 0
    splits[1:, 0], splits[1:, 1], splits[1:, 2] = rows.tokens[of], rows.sequences[of], rows.seen[of]
    splits[1:, 3] = np.arange(num_entries) - (first - skipped)[of]
    return splits


def has_several(splits: Int32s) -> bool:
    """Whether a row of the list has more than one split."""
    return bool((splits[1:, 3] > 0).any())


def prefill_tiles(query_lens: Ints, seq_lens: Ints, group: int, chosen: NDArray[np.bool_]) -> Int32s:  # [n, 2]
    """(sequence, tile of rows) for the prefill kernel, the tiles with the most context first. `group`: query heads per
    KV head."""
    counts = np.where(chosen, -(-query_lens * group // PREFILL_ROWS), 0)
    sequences = np.repeat(np.arange(len(counts)), counts)
    tiles = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = np.minimum((tiles + 1) * PREFILL_ROWS // group, query_lens[sequences])
    keys = seq_lens[sequences] - query_lens[sequences] + last
    order = np.argsort(-keys, kind="stable")
    return np.stack((sequences[order], tiles[order]), 1).astype(np.int32)


def check_list(name: str, given: torch.Tensor, width: int) -> None:
    fits = given.dtype == torch.int32 and given.dim() == 2 and given.shape[1] == width and given.is_contiguous()
    require(fits, f"{name} is {given.dtype} {list(given.shape)}; it must be int32 [n, {width}], contiguous")
