"""Native choice of tokens from logits. vllm_lite/worker/sampling/sampler.py defines it and is the reference."""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cpu.library import Function, function, int32, int64, pointer
from vllm_lite.kernels.sampling import DRAW, MaskedRows, Picked, check_masked

_SAMPLE_TYPES = (pointer, int64, int32, int64, pointer, pointer, pointer, pointer)


class BestOf:
    """`pick` for rows that all take their best token, from logits whose address does not change: one call, no
    allocation."""

    def __init__(self, logits: torch.Tensor) -> None:
        """logits: float32 [num_rows, vocab], on the CPU, each row contiguous."""
        self.logits = logits
        self._draws = np.zeros(len(logits), DRAW)
        self._sample, self._arguments, self._picked = _prepared(logits, self._draws)

    def __call__(self) -> Picked:
        """Pick the best token of each row. The next call overwrites the result."""
        self._sample(*self._arguments)
        return self._picked


def pick(
    logits: torch.Tensor,  # float32 [num_rows, vocab], on the CPU, each row contiguous
    draws: NDArray[np.void],  # DRAW [num_rows]
) -> Picked:
    """Pick one token per row, without changing the logits. The token of a row with a logit that is not finite has no
    meaning."""
    sample, arguments, picked = _prepared(logits, draws)
    sample(*arguments)
    return picked


def _prepared(logits: torch.Tensor, draws: NDArray[np.void]) -> tuple[Function, tuple[int, ...], Picked]:
    """The native function, its arguments, and the arrays that its result will be written to."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 rows on the CPU, got {logits.dtype} {list(logits.shape)}")
    if draws.dtype != DRAW or not draws.flags.c_contiguous or draws.shape != logits.shape[:1]:
        raise ValueError(f"draws must be a contiguous array of DRAW records, one per row, got {draws.dtype}")
    num_rows, vocab = logits.shape
    words = np.empty(2 * num_rows, np.int64)  # one array: reading the address of an array takes a microsecond
    address, num_bytes = words.ctypes.data, 8 * num_rows
    outputs = address, address + num_bytes, address + num_bytes + num_bytes // 2
    arguments = (logits.data_ptr(), logits.stride(0), vocab, num_rows, draws.ctypes.data, *outputs)
    floats = words[num_rows:].view(np.float32)
    picked = Picked(words[:num_rows], floats[:num_rows], floats[num_rows:])
    return function("vllm_lite_sample", _SAMPLE_TYPES), arguments, picked


# ---- Bitmasks on rows of logits. TokenMasks in vllm_lite/worker/sampling/masks.py has the reference


_MASK_TYPES = (pointer, int64, int32, pointer, int64, pointer, int64)


def rule_out(
    logits: torch.Tensor,  # float32 [num_rows, vocab], on the CPU, each row contiguous
    masked: MaskedRows,
) -> None:
    """Add minus infinity to the logits whose bits are clear, in place. Raises ValueError for wrong shapes or types."""
    check_masked(logits, masked)
    samples, bitmasks = masked
    function("vllm_lite_rule_out", _MASK_TYPES)(
        *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
        *(samples.ctypes.data, len(samples), bitmasks.ctypes.data, bitmasks.shape[1]),
    )
