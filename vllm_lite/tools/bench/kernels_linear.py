"""Linear layers on a CPU: ours, torch's and oneDNN's prepacked, one after the other in the same run.

Weights are taken in turn from more copies than the caches hold, so few rows run at the speed of memory, and that is the
limit that they are held against. With one thread time is CPU time, which a busy machine does not lengthen much.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypedDict

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.library import function, int64, pointer
from vllm_lite.kernels.cpu.linear import PackedWeight, linear
from vllm_lite.kernels.cpu.memory import zeros
from vllm_lite.layers import onednn

SHAPES = ((4096, 1024), (4096, 4096), (2048, 768))
"""Outputs and inputs."""
NUM_ROWS = (1, 4, 8, 32, 128, 512)
WORKING_SET_BYTES = 128 << 20  # of weights, above any cache that one socket's cores share with two threads
MIN_TIME_S = 0.3  # for each kernel

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""out = x W^T: product(x [num_rows, inputs], out [num_rows, outputs])."""


class Row(TypedDict):
    kernel: str
    shape: str
    us: float
    gb_s: float  # of weights
    limit: float  # GB/s at which as many threads read memory
    share: float  # gb_s / limit


def read_bandwidth_gb_s(num_threads: int, num_bytes: int = 512 << 20) -> float:
    """What `num_threads` of our threads read from memory on huge pages."""
    cpu.set_num_threads(num_threads)
    data = zeros(num_bytes, torch.uint8).fill_(1)
    read = function("vllm_lite_read", (pointer, int64), int64)
    return num_bytes / min(_timed(num_threads, lambda: read(data.data_ptr(), num_bytes)) for _ in range(8)) / 1e9


def measure(num_threads: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """All shapes and numbers of rows. Changes the number of threads, torch's too."""
    if not cpu.available():
        raise RuntimeError("there are no native CPU kernels to measure")
    torch.set_num_threads(num_threads)
    limit = 0.0
    for num_outputs, num_inputs in SHAPES:
        limit = max(limit, read_bandwidth_gb_s(num_threads))
        num_copies = -(-WORKING_SET_BYTES // (num_outputs * num_inputs * dtype.itemsize))
        kernels = _kernels(torch.randn(num_outputs, num_inputs).to(dtype), num_copies)
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, num_inputs).to(dtype)
            out = torch.empty(num_rows, num_outputs, dtype=dtype)
            best = _best_times(num_threads, kernels, x, out)
            for (name, (num_bytes, _)), seconds in zip(kernels.items(), best, strict=True):
                speed = num_bytes / seconds / 1e9
                shape = f"{num_rows} x {num_inputs} x {num_outputs}"
                kernel = f"{name} {str(dtype).removeprefix('torch.')}, threads: {num_threads}"
                yield Row(kernel=kernel, shape=shape, us=seconds * 1e6, gb_s=speed, limit=limit, share=speed / limit)


def _kernels(weight: torch.Tensor, num_copies: int) -> dict[str, tuple[int, list[Product]]]:
    """By name: bytes of one weight, and a product for each of its copies."""
    dense = [weight.clone() for _ in range(num_copies)]
    kernels: dict[str, tuple[int, list[Product]]] = {}
    for name, int8 in (("own", False), ("own int8", True)):
        packed = [PackedWeight(weight, int8=int8) for _ in range(num_copies * (weight.element_size() if int8 else 1))]
        kernels[name] = packed[0].num_bytes, [partial(_own, one) for one in packed]
    kernels["torch.mm"] = weight.nbytes, [partial(_mm, one) for one in dense]
    reordered = [one for one in map(onednn.pack, dense) if one is not None]
    if reordered:
        kernels["oneDNN packed"] = weight.nbytes, [partial(_onednn, one) for one in reordered]
    return kernels


def _own(weight: PackedWeight, x: torch.Tensor, out: torch.Tensor) -> None:
    linear(x, weight, out)


def _mm(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def _onednn(weight: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> None:
    onednn.packed_linear(x, weight, None)  # into a tensor of its own: it has no `out`


def _best_times(
    num_threads: int, kernels: dict[str, tuple[int, list[Product]]], x: torch.Tensor, out: torch.Tensor
) -> list[float]:
    """Seconds of one product, for each kernel: the best pass over all its copies. Kernels alternate."""
    best = [float("inf")] * len(kernels)
    deadline = time.monotonic() + MIN_TIME_S * len(kernels)
    rounds = 0
    while rounds < 3 or time.monotonic() < deadline:
        rounds += 1
        for i, (_, products) in enumerate(kernels.values()):

            def once(products: list[Product] = products) -> None:
                for product in products:
                    product(x, out)

            best[i] = min(best[i], _timed(num_threads, once) / len(products))
    return best


def _timed(num_threads: int, run: Callable[[], object]) -> float:
    clock = time.process_time if num_threads == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start
