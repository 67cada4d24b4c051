"""Part of `gpu_check_bench`: linear layers on packed quantized weights, next to torch's on dense ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.weights import packed_linear
from vllm_lite.kernels.cuda.weights.many_rows import for_weight
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
from vllm_lite.kernels.cuda.weights.packed_weight import (
    ONE_GROUP,
    OUTPUTS,
    TILE,
    TILE_BYTES,
    GpuPackedWeight,
    chunk_inputs,
)

DENSE = "torch mm, bfloat16"
ROWS = (1, 8, 32, 64, 128, 512)
OTHER_WAYS = (32, 64, 128)
"""Numbers of rows that tiles of 256 outputs multiply. They are also measured with the kernel for few rows and with
torch's products for many rows, which shows whether to change FEW_ROWS and TILED_ROWS."""


Ways = Sequence[Callable[[], None]]


class Kind(NamedTuple):
    """A form of weights: its codes and scales."""

    name: str
    codes: str
    group_size: int | None
    """Inputs per scale; None: one scale for each output."""
    less: str
    scales: torch.dtype


KINDS = (
    Kind("int4 g128", "INT4", 128, "NOTHING", torch.bfloat16),
    Kind("int4 g128 zeros", "INT4", 128, "ZEROS", torch.float16),
    Kind("int4 g32", "INT4", 32, "NOTHING", torch.bfloat16),
    Kind("int8", "INT8", None, "NOTHING", torch.float32),
    Kind("fp8 g128", "E4M3", 128, "NOTHING", torch.bfloat16),
    Kind("fp8", "E4M3", None, "NOTHING", torch.float32),  # many rows become float8, too
)


def random_weight(kind: Kind, sizes: tuple[int, int], device: torch.device) -> GpuPackedWeight:
    """A weight of random codes in the packed layout. It is not made by packing, which would take longer than the
    measurement. `sizes`: outputs, a multiple of 64, and inputs, a multiple of a chunk."""
    outputs, inputs = sizes
    shape = outputs // TILE, inputs // chunk_inputs(kind.codes), TILE_BYTES
    most = 0x78 if kind.codes == "E4M3" else 256  # float8 has NaN
    codes = torch.randint(most, shape, dtype=torch.uint8, device=device)
    groups = -(-inputs // (kind.group_size or inputs))
    scales = torch.rand(groups, outputs, 1 if kind.less == "NOTHING" else 2, device=device) / 100
    shift = ONE_GROUP if kind.group_size is None else (kind.group_size // 32).bit_length() - 1
    return GpuPackedWeight(sizes, codes, scales.to(kind.scales), shift, kind.codes, kind.less, None)


class Problem(NamedTuple):
    """Sizes of a product of rows and a weight."""

    rows: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.outputs} x {self.inputs}"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.outputs * self.inputs


def measure(bench: Any, launcher: Launcher, device: torch.device) -> None:
    """Report each form and number of rows: bytes of weights per second for up to 8 rows, products per second for more,
    and torch's with dense weights. `bench` is a Bench of gpu_check_bench."""
    sizes, counts = (((OUTPUTS, 128),), (1, 64)) if bench.small else (((4096, 4096), (28672, 8192)), ROWS)
    for problem in (Problem(rows, *size) for size in sizes for rows in counts):
        x, out, weight = (
            torch.randn(shape, dtype=torch.bfloat16, device=device)
            for shape in ((problem.rows, problem.inputs), (problem.rows, problem.outputs), problem[1:])
        )
        ways: Ways = [partial(_dense, x, each, out) for each in _cold(bench, weight)]
        against = _measure_one(bench, (problem, DENSE), ways, weight.nbytes)
        for kind in KINDS:
            packed = random_weight(kind, problem[1:], device)
            cold = (packed._replace(codes=codes) for codes in _cold(bench, packed.codes))
            layers = [PackedLinear(launcher, each, None, for_weight(launcher, each, float8_rows=True)) for each in cold]
            ways = [partial(layer.forward, x, out) for layer in layers]
            _measure_one(bench, (problem, f"linear, {kind.name}"), ways, packed.num_bytes, against)
            if problem.rows in OTHER_WAYS:
                with bounds(problem.rows, problem.rows):
                    name = f"linear, {kind.name}, codes"
                    _measure_one(bench, (problem, name), ways, packed.num_bytes, against)
                with bounds(0, 0):
                    name = f"linear, {kind.name}, widened"
                    _measure_one(bench, (problem, name), ways, packed.num_bytes, against)


@contextmanager
def bounds(few: int, tiled: int) -> Iterator[None]:
    """Change the bounds: up to `few` rows use the kernel for few rows, up to `tiled` rows use tiles."""
    names = ("FEW_ROWS", "TILED_ROWS", "TILED_ROWS_BEFORE_FLOAT8")
    kept = [getattr(packed_linear, name) for name in names]
    try:
        for name, value in zip(names, (few, tiled, tiled), strict=True):
            setattr(packed_linear, name, value)
        yield
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(packed_linear, name, value)


def _dense(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def _cold(bench: Any, weight: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the weight, so many that no cache of the device holds them."""
    count = min(64, -(-bench.cold_bytes // weight.nbytes))
    return [weight, *(weight.clone() for _ in range(count - 1))]


def _measure_one(bench: Any, what: tuple[Problem, str], ways: Ways, num_bytes: int, against: float = 0.0) -> float:
    """Measure and report one product. Returns 10^12 operations per second; `against` is the limit to compare them
    with."""
    problem, name = what
    seconds = bench.timer.seconds(lambda which: ways[which](), len(ways))
    rate = float(problem.flops / seconds / 1e12)
    if problem.rows <= 8:
        bench.bytes_row(name, problem, seconds, num_bytes)
    else:
        limit = against or rate
        bench.row(name, problem, seconds, tflop_s=rate, limit=limit, share=rate / limit)
    return rate
