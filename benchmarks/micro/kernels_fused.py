"""The small operations and the sampler on a CPU: our kernels and plain torch take turns in the same run.

Each figure is the shortest time of many calls, as seen by Python, on data in the processor's caches.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from micro.kernels_timing import Row, best_times, name_of
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.ops import Ops, Rotation, TorchOps, WideNormWeights
from vllm_lite.layers.attention.rope import RotaryEmbedding
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, Sampler, draw_records

HIDDEN, INTERMEDIATE, NUM_HEADS, HEAD_SIZE = 1024, 2816, 24, 64
"""Sizes of a model with 0.5 billion parameters. NUM_HEADS counts the heads of Q and K together."""
NUM_ROWS = (1, 32, 512)
DTYPES = (torch.bfloat16, torch.float32)
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T=0.8": {},
    "T=0.8 top_k=50": {"top_k": 50},
    "T=0.8 top_p=0.9": {"top_p": 0.9},
    "T=0.8 top_k=50 top_p=0.9": {"top_k": 50, "top_p": 0.9},
    "T=0.8 min_p=0.05": {"min_p": 0.05},
}
LOGITS = ((32, 4096), (1, 152_000), (8, 152_000))
MIN_TIME_S = 0.1  # for each kernel


def measure() -> Iterator[Row]:
    """Measure all operations; `ratio` is torch's time over ours."""
    yield from _ops()
    yield from _rotations()
    yield from _caps()
    yield from _sampler()


def _ops() -> Iterator[Row]:
    for dtype in DTYPES:
        for num_rows in NUM_ROWS:
            for name, size, run in _op_calls(num_rows, dtype):
                shape = f"{num_rows} x {size} {name_of(dtype)}"
                yield _row(name, shape, partial(run, CpuOps()), partial(run, TorchOps()))


def _op_calls(num_rows: int, dtype: torch.dtype) -> list[tuple[str, str, Callable[[Ops], None]]]:
    """For each operation: its name, the size of a row as text, and a function that calls it."""
    zeros, x, out = torch.zeros(3, num_rows, HIDDEN, dtype=dtype)
    x.normal_()
    weight = torch.randn(HIDDEN).to(dtype)
    heads = torch.randn(num_rows, NUM_HEADS, HEAD_SIZE).to(dtype)
    angles = torch.randn(num_rows, HEAD_SIZE)
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE).to(dtype)
    activated, large = torch.full((2, num_rows, INTERMEDIATE), 8.0, dtype=dtype)
    by_head = f"{NUM_HEADS} x {HEAD_SIZE}"
    layer = WideNormWeights(torch.ones(HIDDEN), torch.ones(HIDDEN), 1e-6, centered=True)
    rms = WideNormWeights(torch.ones(HIDDEN), None, 1e-6, centered=False)
    positions, ones = torch.arange(num_rows), torch.ones(num_rows)
    return [
        # 0 + 0 stays 0, whatever the number of calls
        ("add + RMSNorm", str(HIDDEN), lambda ops: ops.add_rms_norm(zeros, zeros, weight, 1e-6, out)),
        ("RMSNorm", str(HIDDEN), lambda ops: ops.rms_norm(x, weight, 1e-6, out)),
        ("RMSNorm of heads", by_head, lambda ops: ops.rms_norm(heads, weight[:HEAD_SIZE], 1e-6, heads)),
        ("RoPE", by_head, lambda ops: ops.rotate(heads, rotation)),
        ("silu and mul", str(INTERMEDIATE), lambda ops: ops.activate_and_mul("silu", gate_up, activated)),
        ("gelu_tanh and mul", str(INTERMEDIATE), lambda ops: ops.activate_and_mul("gelu_tanh", gate_up, activated)),
        ("gelu", str(INTERMEDIATE), lambda ops: ops.activate("gelu", large)),  # leaves large values unchanged
        ("add + LayerNorm", str(HIDDEN), lambda ops: ops.add_wide_norm(zeros, zeros, layer, out)),
        ("wide RMSNorm", str(HIDDEN), lambda ops: ops.wide_norm(x, rms, out)),
        ("add", str(HIDDEN), lambda ops: ops.add(zeros, zeros)),
        ("add rows", str(HIDDEN), lambda ops: ops.add_rows(zeros, zeros, positions)),
        ("scale", str(HIDDEN), lambda ops: ops.scale(zeros, 0.22)),
        ("scale rows", by_head, lambda ops: ops.scale_rows(heads, ones, positions)),
    ]


def _rotations() -> Iterator[Row]:
    native, plain = (RotaryEmbedding(Rope(1e4), HEAD_SIZE, 8192, device=torch.device("cpu")) for _ in "np")
    plain.native = False
    for num_rows in NUM_ROWS:
        positions = torch.randint(8192, (num_rows,))
        out = Rotation(*torch.empty(2, num_rows, HEAD_SIZE, dtype=torch.bfloat16))
        shape = f"{num_rows} x {HEAD_SIZE} bfloat16"
        own, torchs = (partial(rotary.select, positions, out) for rotary in (native, plain))
        yield _row("rows of cos and sin", shape, own, torchs)


def _caps() -> Iterator[Row]:
    for num_rows, vocab_size in LOGITS:
        logits, ops = torch.randn(num_rows, vocab_size) * 3, (CpuOps(), TorchOps())
        own, plain = (partial(one.scale_and_cap, logits, 1.0, 30.0) for one in ops)
        yield _row("soft cap of logits", f"{num_rows} x {vocab_size}", own, plain)


def _sampler() -> Iterator[Row]:
    for num_rows, vocab_size in LOGITS:
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        sampler = Sampler(vocab_size, torch.device("cpu"))
        for name, columns in FILTERS.items():
            params: np.ndarray[Any, Any] = np.zeros(num_rows, ROW_PARAMS)
            params["seed"] = np.arange(num_rows)
            for column, value in ({"temperature": 0.8, "top_p": 1.0} | columns).items():
                params[column] = value
            draws = draw_records(params, np.zeros(num_rows, np.int64), vocab_size)
            native, plain = partial(sampler.pick, logits, draws), partial(sampler.pick_plainly, logits, draws)
            yield _row(f"sampler, {name}", f"{num_rows} x {vocab_size}", native, plain)


def _row(kernel: str, shape: str, own: Callable[[], object], plain: Callable[[], object]) -> Row:
    own_s, plain_s = best_times(time.perf_counter, (own, plain), MIN_TIME_S)
    return Row(kernel=kernel, shape=shape, us=own_s * 1e6, torch_us=plain_s * 1e6, ratio=plain_s / own_s)
