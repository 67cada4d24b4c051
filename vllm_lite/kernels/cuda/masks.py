"""Bitmasks on rows of logits on a GPU. Kernel: csrc/cuda/masks.cuh; the reference is TokenMasks in
worker/sampling/masks.py."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.kernels.cuda.fused import vector_width
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.sampling import MaskedRows, check_masked

SOURCE = "masks.cuh"
THREADS = 256
UNITS = 4
"""Accesses per thread."""


class OnDevice(NamedTuple):
    """MaskedRows in GPU memory."""

    samples: torch.Tensor  # int64 [n]
    bitmasks: torch.Tensor  # int32 [n, words]


def bring(logits: torch.Tensor, masked: MaskedRows) -> OnDevice:
    """Copy the masks to the device of `logits`, without waiting. Raises ValueError for wrong shapes or types."""
    check_masked(logits, masked)
    arrays = torch.from_numpy(masked.samples), torch.from_numpy(masked.bitmasks.view(np.int32))
    if logits.is_cuda:  # from other memory than pinned the copy would wait for all that was launched before
        arrays = arrays[0].pin_memory(), arrays[1].pin_memory()
    return OnDevice(*(array.to(logits.device, non_blocking=True) for array in arrays))


def rule_out(
    launcher: Launcher,
    logits: torch.Tensor,  # float32 [num_rows, vocab], of the shape given to `bring`
    masked: OnDevice,
) -> None:
    """Set the logits whose bits are clear to minus infinity, in place."""
    samples, bitmasks = masked
    vocab, width = logits.shape[1], vector_width(logits.shape[1], logits)
    if not len(samples) or not vocab:
        return
    chunks = -(-vocab // (THREADS * UNITS * width))
    args = (logits, np.int64(logits.stride(0)), np.int32(vocab), samples, bitmasks, np.int32(bitmasks.shape[1]))
    launcher.kernel(SOURCE, f"rule_out<{width}>")((len(samples), chunks, 1), (THREADS, 1, 1), args)
