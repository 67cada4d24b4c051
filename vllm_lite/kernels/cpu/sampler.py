"""Native choice of tokens from logits. vllm_lite/worker/sampling/sampler.py defines it and is the reference."""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cpu.library import Function, function, int32, int64, pointer
from vllm_lite.kernels.sampling import DRAW, MaskedRows, Picked, check_masked

_SAMPLE_TYPES = (pointer, int64, int32, int64, pointer, pointer, pointer, pointer)


ALL_COLUMNS = slice(None)
MOST_PLACES = 64


class BestOf:
    """`pick` for rows that all take their best token. Steps reuse memory, so for the same place of the logits it is one
    call without an allocation."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int | None, ...], tuple[Function, tuple[int, ...], Picked, NDArray[np.void]]] = {}
        """By the place of the logits; of at most MOST_PLACES places. The last item is read by the call."""

    def __call__(self, logits: torch.Tensor, columns: slice = ALL_COLUMNS) -> Picked:  # float32 [num_rows, vocab]
        """Pick the best of `columns` in each row, counted from the first of them. The next call with logits in the same
        place overwrites the result."""
        place = logits.data_ptr(), logits.stride(0), *logits.shape, columns.start, columns.stop
        found = self._prepared.get(place)
        if found is None:
            draws = np.zeros(len(logits), DRAW)
            if len(self._prepared) == MOST_PLACES:
                self._prepared.clear()
            self._prepared[place] = found = *_prepared(logits[:, columns], draws), draws
        sample, arguments, picked, _ = found
        sample(*arguments)
        return picked


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
