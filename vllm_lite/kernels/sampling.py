"""Inputs and results of the sampling and mask kernels of all devices, which worker/sampling defines."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("sample", np.uint32),
        ("position", np.uint32),
        ("temperature", np.float32),  # 0 = greedy; the rest of the record is then unused
        ("top_k", np.int32),  # 1 to the size of the vocabulary; the latter = off
        ("top_p", np.float32),  # 1 = off
        ("max_distance", np.float32),  # limit of min_p, infinity = off
    ]
)
"""One record per row of logits, 32 bytes; the same as `Draw` in csrc/cpu/sampler.h."""


class Picked(NamedTuple):
    """Holds the result of each row."""

    tokens: NDArray[np.int64]  # [num_rows], within the vocabulary, even if the row is not finite
    best: NDArray[np.float32]  # [num_rows], the largest logit; NaN if one of them is
    limits: NDArray[np.float32]  # [num_rows], the greatest distance kept, infinity if nothing was filtered


# ---- Inputs of the mask kernels of all devices: rows of logits, and a bitmask for each


class MaskedRows(NamedTuple):
    """Rows of logits, none of them twice, and a bitmask of the allowed tokens of each."""

    samples: NDArray[np.int64]  # [n], rows of the logits
    bitmasks: NDArray[np.uint32]  # [n, ceil(vocab / 32)]; token t has bit t % 32 of word t // 32, 1 = allowed


def check_masked(logits: torch.Tensor, masked: MaskedRows) -> None:
    """Raise ValueError unless `logits` are float32 [num_rows, vocab] with contiguous rows, and `masked` fits them."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be contiguous float32 rows, got {logits.dtype} {list(logits.shape)}")
    samples, bitmasks = masked
    shape = len(samples), -(-logits.shape[1] // 32)
    if bitmasks.dtype != np.uint32 or not bitmasks.flags.c_contiguous or bitmasks.shape != shape:
        raise ValueError(f"bitmasks must be contiguous uint32 {list(shape)}, got {bitmasks.dtype} {bitmasks.shape}")
    if samples.dtype != np.int64 or not samples.flags.c_contiguous or samples.ndim != 1:
        raise ValueError(f"samples must be a contiguous int64 array, got {samples.dtype} {samples.shape}")
    if len(samples) and not 0 <= samples.min() <= samples.max() < len(logits):
        raise ValueError(f"samples must lie in [0, {len(logits)}), got {samples.min()} to {samples.max()}")
