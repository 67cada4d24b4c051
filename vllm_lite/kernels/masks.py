"""Inputs of the kernels that rule tokens out, on all devices: rows of logits, and a bitmask for each."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class MaskedRows(NamedTuple):
    """Names rows of logits, none of them twice, and says which tokens each may become."""

    samples: NDArray[np.int64]  # [n], rows of the logits
    bitmasks: NDArray[np.uint32]  # [n, ceil(vocab / 32)]; token t has bit t % 32 of word t // 32, 1 = allowed


def check(logits: torch.Tensor, masked: MaskedRows) -> None:
    """Raises ValueError unless `logits` are float32 [num_rows, vocab] with contiguous rows, and `masked` fits them."""
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
