"""Bitmasks applied to logits on a CPU: our kernel and plain torch take turns in the same run."""

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from micro.kernels_timing import Row, best_times
from vllm_lite.worker.sampling.masks import TokenMasks

NUM_ROWS = (1, 32, 256)
VOCAB_SIZES = (32_000, 152_000)
MIN_TIME_S = 0.1  # for each kernel


def measure() -> Iterator[Row]:
    """Measure all sizes; `ratio` is torch's time over ours."""
    random = np.random.default_rng(0)
    for vocab_size in VOCAB_SIZES:
        for num_rows in NUM_ROWS:
            logits = torch.zeros(num_rows, vocab_size)
            bitmasks = random.integers(0, 1 << 32, (num_rows, -(-vocab_size // 32)), np.uint32)
            masks = TokenMasks(np.arange(num_rows), bitmasks)
            calls = partial(masks.apply, logits), partial(masks.apply_plainly, logits)
            own_s, plain_s = best_times(time.perf_counter, calls, MIN_TIME_S)
            shape = f"{num_rows} x {vocab_size}"
            yield Row(
                kernel="mask of tokens", shape=shape, us=own_s * 1e6, torch_us=plain_s * 1e6, ratio=plain_s / own_s
            )
