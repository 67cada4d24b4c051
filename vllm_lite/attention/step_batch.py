"""One step's batch, made once per step and shared by the model, its layers and the attention backend."""

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
    """Encode positions along three axes as one number per token: `down` and `across` count from `time`. The number of a
    token with three equal positions is that position."""
    packed: NDArray[np.int64] = time | down << AXIS_BITS | across << 2 * AXIS_BITS
    return packed


class TokenVectors(NamedTuple):
    """Vectors that replace the embeddings of placeholder tokens."""

    rows: torch.Tensor  # int64 [n], of the step's tokens
    vectors: torch.Tensor  # [n, hidden_size], input of the first layer
    deep: tuple[torch.Tensor, ...] = ()  # [n, hidden_size] each: added after the first layer, the second, ...


PutVectors = Callable[[TokenVectors, torch.Tensor], object]
"""Function of a step's vectors and the positions of its tokens; its result is ignored."""


class WholeImage(NamedTuple):
    """Tokens of an image that a step computes, up to the image's last: `num_rows` rows from `first_row`, of sequence
    `sequence` of the step, at the positions before `end`."""

    sequence: int
    first_row: int
    num_rows: int
    end: int


@dataclass(slots=True)
class StepBatch:
    """The tokens of a step and the slots of their KV. A tuple has one entry for each KV group.

    Rows of all sequences are concatenated: sequence i owns rows `query_start_loc[i] : query_start_loc[i + 1]`. They are
    the last of its `seq_lens[i]` tokens, so row j of q may see the first seq_len - q + j + 1 tokens.
    Padding: rows after the last sequence's, and sequences with seq_len 0; their attention is zero.
    """

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    token_ids: torch.Tensor  # int [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]; with `vectors` possibly along several axes, see `on_axes`
    query_start_loc: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs], tokens in the cache after this step's writes
    block_tables: tuple[torch.Tensor, ...]  # int32 [num_seqs, max_blocks], entries past the length unused
    slot_mapping: tuple[torch.Tensor, ...]  # int64 [num_tokens], block id * block size + offset, or PAD_SLOT
    token_types: torch.Tensor | None = None  # int64 [num_tokens], 1 in the second text of a pair; None = all 0
    wanted: torch.Tensor | None = None  # int64 [num_wanted], rows whose hidden states are wanted; None = all
    states: Segments | None = None
    """State slots that recurrent layers read and write; None: there are no such layers."""
    tentative: torch.Tensor | None = None
    """int64 [num_tentative], rows of draft tokens, which states include only once they are accepted; None: none."""
    vectors: TokenVectors | None = None
    """Vectors that `Decoder.embed` puts in place of token embeddings; None for text."""
    late: Callable[[PutVectors], None] | None = None
    """Set only in the batch of a step that is recorded: takes the function to call at this point of each replay with
    the vectors of its step, if it has any."""
    images: tuple[WholeImage, ...] = ()
    """Images whose tokens attend to each other in both directions, in layers whose spec has `whole_images`."""
    tail: "StepBatch | None" = None
    """The `wanted` rows as a batch, with which to continue once the last layer has written to the cache; None: the rows
    are not the ends of sequences, or it would not pay."""
    host: "HostLens | None" = None
    """The same lengths in host memory, for planning; None in a graph's batch, whose lengths change with each replay."""
    plan: Any = None
    """The step's plan, made by the backend's `prepare`; opaque to everyone else."""
    larger: "StepBatch | None" = None
    """A prepared batch at least as large that nobody uses at the same time: if set, `prepare` may put the plan into the
    memory of that one's."""
    image_plan: Any = None
    """The plan of WholeImages, which computes `images` separately."""

    def with_vectors(self, put: PutVectors) -> None:
        """Call `put` with the step's vectors, if it has any; in a recorded step, with the vectors of each replay."""
        if self.vectors is not None:
            put(self.vectors, self.positions)
        elif self.late is not None:
            self.late(put)


def staged(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor from which a copy to the device can begin at once: for a GPU in pinned memory, else the copy
    would wait for all earlier launches. torch keeps the pinned memory until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to the device asynchronously."""
    return staged(array, device).to(device, non_blocking=True)


def all_to_device(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Copy all arrays by one asynchronous copy, into one buffer where each begins at a multiple of 16 bytes."""
    sizes = [array.size + -array.size % 4 for array in arrays]
    flat, start = np.empty(sum(sizes), np.int32), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.size] = array.ravel()
        start += size
    parts = to_device(flat, device).split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


@dataclass(frozen=True, slots=True)
class HostLens:
    """Lengths of a step's sequences in host memory, so that planning need not wait for a GPU."""

    query_lens: NDArray[np.integer[Any]]  # [num_seqs]
    seq_lens: NDArray[np.integer[Any]]  # [num_seqs]
    block_tables: Sequence[NDArray[np.int32]] = ()
    """Block tables of each KV group, [num_seqs, any], to find shared prefixes; empty: nothing is shared."""
