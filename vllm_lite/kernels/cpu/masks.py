"""Bitmasks on rows of logits. TokenMasks in vllm_lite/worker/sampling/masks.py defines them, and has the plain twin."""

import torch

from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.masks import MaskedRows, check

_TYPES = (pointer, int64, int32, pointer, int64, pointer, int64)


def rule_out(
    logits: torch.Tensor,  # float32 [num_rows, vocab], on the CPU, each row contiguous
    masked: MaskedRows,
) -> None:
    """Add minus infinity to the logits whose bits are clear, in place. Raises ValueError for wrong shapes or types."""
    check(logits, masked)
    samples, bitmasks = masked
    function("vllm_lite_rule_out", _TYPES)(
        *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
        *(samples.ctypes.data, len(samples), bitmasks.ctypes.data, bitmasks.shape[1]),
    )
