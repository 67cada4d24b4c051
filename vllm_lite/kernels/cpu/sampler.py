"""The random draw of the sampler. Its plain twin, which also defines the noise, is vllm_lite/worker/sampler.py."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cpu.library import function, int32, int64, pointer

DRAW = np.dtype(
    [
        ("row", np.int64),  # of the logits
        ("seed", np.uint64),
        ("child", np.uint32),
        ("position", np.uint32),
        ("offset", np.float32),  # subtracted from the logits: the row's largest
        ("temperature", np.float32),  # above 0
    ]
)
"""One draw; the same record as `Draw` in csrc/cpu/sampler.cpp."""

_DRAW_TYPES = (pointer, int64, int32, int64, pointer, pointer)
_NOISE_TYPES = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, int32, pointer, pointer)


def draw(
    logits: torch.Tensor,  # float32 [num_rows, vocab], on the CPU, each row contiguous
    draws: NDArray[np.void],  # DRAW [num_draws]
) -> torch.Tensor:  # int64 [num_draws]
    """For each draw the first token with the largest (logit - offset) / temperature + noise; 0 if all are -infinity.

    The noise is defined in vllm_lite/worker/sampler.py.
    """
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 rows on the CPU, got {logits.dtype} {list(logits.shape)}")
    if draws.dtype != DRAW or not draws.flags.c_contiguous or draws.ndim != 1:
        raise ValueError(f"draws must be a contiguous array of DRAW records, got {draws.dtype}")
    rows = draws["row"]
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
        raise ValueError(f"rows must lie in [0, {len(logits)}), got {rows.tolist()}")
    tokens = torch.empty(len(draws), dtype=torch.int64)
    function("vllm_lite_draw", _DRAW_TYPES)(
        logits.data_ptr(), logits.stride(0), logits.shape[1], len(draws), draws.ctypes.data, tokens.data_ptr()
    )
    return tokens


def noise(
    seed: int, child: int, position: int, vocab_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:  # both [vocab]
    """The hash and the noise of every token of one row. For tests: `draw` computes them on its way."""
    hashes, values = np.empty(vocab_size, np.uint32), np.empty(vocab_size, np.float32)
    function("vllm_lite_noise", _NOISE_TYPES)(seed, child, position, vocab_size, hashes.ctypes.data, values.ctypes.data)
    return hashes, values
