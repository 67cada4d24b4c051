"""One step's batch, as the model, its layers and the attention backend see it. Made once per step, shared by all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.recurrent import Segments

PAD_SLOT = -1
"""Slot of a token whose K and V are not written: padding, and a recomputed token whose KV is already in the cache."""


AXIS_BITS = 21
AXIS_MASK = (1 << AXIS_BITS) - 1


def on_axes(time: NDArray[np.int64], down: NDArray[np.int64], across: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions along three axes as one number for each token: `down` and `across` count from `time`. Where all three
    are equal it is that position itself."""
    packed: NDArray[np.int64] = time | down << AXIS_BITS | across << 2 * AXIS_BITS
    return packed


class TokenVectors(NamedTuple):
    """Vectors that stand in the place of those of placeholder tokens."""

    rows: torch.Tensor  # int64 [n], of the step's tokens
    vectors: torch.Tensor  # [n, hidden_size], as the first layer reads them
    deep: tuple[torch.Tensor, ...] = ()  # [n, hidden_size] each: added behind the first layer, the second, ...


PutVectors = Callable[[TokenVectors, torch.Tensor], object]
"""Uses a step's vectors and the positions of its tokens."""


class WholeImage(NamedTuple):
    """Tokens of an image that a step computes, up to its last: `num_rows` rows from `first_row` on, which belong to
    sequence `sequence` of the step, at the positions before `end`."""

    sequence: int
    first_row: int
    num_rows: int
    end: int


@dataclass(slots=True)
class StepBatch:
    """The tokens of a step and where their KV lies. A tuple has one entry for each KV group.

    Rows of all sequences stand one after another: sequence i owns rows `query_start_loc[i] : query_start_loc[i + 1]`.
    Its query rows are the last ones of its `seq_lens[i]` tokens, so row j of q may see the first seq_len - q + j + 1.
    Padding: rows after the last sequence's, and sequences with seq_len 0; their attention is zero.
    """

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    token_ids: torch.Tensor  # int [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens], as the model counts; with `vectors` perhaps along several axes
    query_start_loc: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs], tokens in the cache after this step's writes
    block_tables: tuple[torch.Tensor, ...]  # int32 [num_seqs, max_blocks], entries past the length unused
    slot_mapping: tuple[torch.Tensor, ...]  # int64 [num_tokens], block id * block size + offset, or PAD_SLOT
    token_types: torch.Tensor | None = None  # int64 [num_tokens], 1 in the second text of a pair; None = all 0
    wanted: torch.Tensor | None = None  # int64 [num_wanted], rows whose hidden states are wanted; None = all
    states: Segments | None = None
    """Where recurrent layers find and leave the states of the sequences; None: there are no such layers."""
    tentative: torch.Tensor | None = None
    """int64 [num_tentative], rows that no state takes up before it is known whether they are right; None: none."""
    vectors: TokenVectors | None = None
    """What `Decoder.embed` puts in beside the vectors of tokens; None: nothing, as for text."""
    late: Callable[[PutVectors], None] | None = None
    """In the batch of a step that is recorded, and replayed with the vectors of each: takes what is to be done there in
    steps that have some."""
    images: tuple[WholeImage, ...] = ()
    """Images whose tokens see each other both ways, in layers whose spec says so."""
    tail: "StepBatch | None" = None
    """The `wanted` rows as a batch, for what follows once the last layer has written to the cache; None: they are not
    the ends of sequences, or it would not pay."""
    host: "HostLens | None" = None
    """The lengths once more, for planning; None in the batch of a graph, which runs with other lengths each time."""
    plan: Any = None
    """What the backend's `prepare` worked out for this step; opaque to everyone else."""
    image_plan: Any = None
    """The same of a backend that computes `images` apart."""

    def with_vectors(self, put: PutVectors) -> None:
        """`put` the vectors of this step in, if it has any, or those of each step that it is recorded for."""
        if self.vectors is not None:
            put(self.vectors, self.positions)
        elif self.late is not None:
            self.late(put)


def staged(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` where a copy to the device can begin at once: for a GPU in pinned memory, or the copy would wait for all
    that was launched before. torch keeps the pinned memory until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on the device, by a copy that nobody waits for."""
    return staged(array, device).to(device, non_blocking=True)


def all_to_device(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """As `to_device`, all by one copy, into one memory where each begins at a multiple of 16 bytes."""
    sizes = [array.size + -array.size % 4 for array in arrays]
    flat, start = np.empty(sum(sizes), np.int32), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.size] = array.ravel()
        start += size
    parts = to_device(flat, device).split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


@dataclass(frozen=True, slots=True)
class HostLens:
    """The lengths of a step's sequences in host memory: to read them from a GPU would be to wait for it."""

    query_lens: NDArray[np.integer[Any]]  # [num_seqs]
    seq_lens: NDArray[np.integer[Any]]  # [num_seqs]
    block_tables: Sequence[NDArray[np.int32]] = ()
    """The block tables of each KV group, [num_seqs, any], for what sequences have in common; none: nothing is."""
