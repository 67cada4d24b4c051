"""The record and the result of the sampling kernels of all devices, which worker/sampling/sampler.py defines."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("sample", np.uint32),
        ("position", np.uint32),
        ("temperature", np.float32),  # 0 = greedy, and nothing else of the record counts
        ("top_k", np.int32),  # 1 to the size of the vocabulary, which is off
        ("top_p", np.float32),  # 1 = off
        ("max_distance", np.float32),  # what min_p allows, infinity = off
    ]
)
"""One record per row of logits, 32 bytes; the same as `Draw` in csrc/cpu/sampler.h."""


class Picked(NamedTuple):
    """Holds the result of each row."""

    tokens: NDArray[np.int64]  # [num_rows], within the vocabulary, also where the row is not finite
    best: NDArray[np.float32]  # [num_rows], the largest logit; NaN if one of them is
    limits: NDArray[np.float32]  # [num_rows], the greatest distance kept, infinity where nothing was filtered
