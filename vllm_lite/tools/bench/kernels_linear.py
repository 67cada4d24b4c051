"""Linear layers on a CPU: ours, torch's and oneDNN's prepacked, one after the other in the same run.

Weights are taken in turn from more copies than the caches hold, so few rows run at the speed of memory, and that is the
limit that they are held against. With one thread time is CPU time, which a busy machine does not lengthen much.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_lite.kernels.cpu.linear import PackedWeight, linear
from vllm_lite.kernels.grouped import E4M3, INT4, INT8, GroupedWeight
from vllm_lite.layers import onednn
from vllm_lite.tools.bench.kernels_timing import Row, best_times, clock_for, name_of, read_bandwidth_gb_s

SHAPES = ((4096, 1024), (4096, 4096), (2048, 768))
"""Outputs and inputs."""
NUM_ROWS = (1, 4, 8, 32, 128, 512)
WORKING_SET_BYTES = 128 << 20  # of weights, above any cache that one socket's cores share with two threads
MIN_TIME_S = 0.3  # for each kernel
TABLE = torch.linspace(-1, 1, 16).pow(3)
"""16 floats that are no whole numbers, as those of NF4."""

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""out = x W^T: product(x [num_rows, inputs], out [num_rows, outputs])."""


def measure(num_threads: int, dtype: torch.dtype) -> Iterator[Row]:
    """All shapes and numbers of rows. `gb_s` is of weights, `limit` the speed at which as many threads read memory."""
    limit = 0.0
    for num_outputs, num_inputs in SHAPES:
        limit = max(limit, read_bandwidth_gb_s(num_threads))
        num_copies = -(-WORKING_SET_BYTES // (num_outputs * num_inputs * dtype.itemsize))
        kernels = _kernels(torch.randn(num_outputs, num_inputs).to(dtype), num_copies)
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, num_inputs).to(dtype)
            out = torch.empty(num_rows, num_outputs, dtype=dtype)
            passes = [partial(_multiply, products, x, out) for _, products in kernels.values()]
            best = best_times(clock_for(num_threads), passes, MIN_TIME_S)
            for (name, (num_bytes, products)), pass_s in zip(kernels.items(), best, strict=True):
                seconds = pass_s / len(products)
                speed = num_bytes / seconds / 1e9
                shape = f"{num_rows} x {num_inputs} x {num_outputs}"
                kernel = f"{name} {name_of(dtype)}, threads: {num_threads}"
                yield Row(kernel=kernel, shape=shape, us=seconds * 1e6, gb_s=speed, limit=limit, share=speed / limit)


def _kernels(weight: torch.Tensor, num_copies: int) -> dict[str, tuple[int, list[Product]]]:
    """By name: bytes of one weight, and a product for each of its copies."""
    dense = [weight.clone() for _ in range(num_copies)]
    kernels: dict[str, tuple[int, list[Product]]] = {}
    forms: tuple[tuple[str, Callable[[], PackedWeight]], ...] = (
        ("own", lambda: PackedWeight(weight)),
        ("own int8", lambda: PackedWeight(weight, int8=True)),
        ("own int4 g32", lambda: PackedWeight(_grouped(weight, INT4, 32))),
        ("own int4 g128", lambda: PackedWeight(_grouped(weight, INT4, 128))),
        ("own int8 g32", lambda: PackedWeight(_grouped(weight, INT8, 32))),
        ("own int8 g128", lambda: PackedWeight(_grouped(weight, INT8, 128))),
        ("own fp8 g128", lambda: PackedWeight(_grouped(weight, E4M3, 128))),
        ("own table g64", lambda: PackedWeight(_grouped(weight, TABLE, 64))),
    )
    for name, make in forms:
        first = make()
        packed = [first, *(make() for _ in range(num_copies * weight.nbytes // first.num_bytes - 1))]
        kernels[name] = first.num_bytes, [partial(_own, one) for one in packed]
    kernels["torch.mm"] = weight.nbytes, [partial(_mm, one) for one in dense]
    reordered = [one for one in map(onednn.pack, dense) if one is not None]
    if reordered:
        kernels["oneDNN packed"] = weight.nbytes, [partial(_onednn, one) for one in reordered]
    return kernels


def _grouped(weight: torch.Tensor, values: torch.Tensor, group_size: int) -> GroupedWeight:
    """A weight of this shape; what its numbers are has no influence on times."""
    codes = torch.randint(len(values) // 2 - 1, weight.shape, dtype=torch.uint8)  # fp8's NaN comes after
    return GroupedWeight(codes, values, torch.ones(len(weight), weight.shape[1] // group_size), group_size)


def _own(weight: PackedWeight, x: torch.Tensor, out: torch.Tensor) -> None:
    linear(x, weight, out)


def _mm(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def _onednn(weight: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> None:
    onednn.packed_linear(x, weight, None)  # into a tensor of its own: it has no `out`


def _multiply(products: list[Product], x: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply by all copies of a weight once."""
    for product in products:
        product(x, out)
