"""Cases of products with packed quantized weights, as named functions of a launcher and a device.

No pytest in here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.kernels.cases import Case
from tests.kernels.fused_cases import draw, with_gaps
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.weights import many_rows, packed_linear
from vllm_lite.kernels.cuda.weights.many_rows import Float8Products, WidenedProducts, quantized_rows
from vllm_lite.kernels.cuda.weights.packed_linear import TILED_ROWS, PackedLinear, num_parts
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.grouped import E2M1, E4M3, INT4, INT8, UINT4, UINT8, GroupedWeight, dequantize

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = 4e-6
"""Maximum error relative to the sum of the addends' magnitudes: float32 sums, which tensor cores truncate instead of
rounding."""
CHANNEL = 1 << 20
"""Group size of a scale for all inputs of an output."""
BY_CODES = 128
"""Maximum number of rows that the kernels multiply in these cases, more than layers let them."""


class Sizes(NamedTuple):
    """Sizes that need padding, with an incomplete last group."""

    outputs: int = 75
    inputs: int = 200


def weight(
    values: torch.Tensor, group_size: int, less: str = "nothing", sizes: Sizes | None = None, scale: torch.dtype = F16
) -> GroupedWeight:
    """A random weight. `less` is what is subtracted: "nothing", "zeros" (codes), or "minima" (any numbers), with which
    the scales of every third output are 0."""
    sizes = sizes or Sizes()
    generator = torch.Generator().manual_seed(sum(sizes) + group_size + len(values))
    codes = torch.randint(len(values), sizes, generator=generator, dtype=torch.uint8)
    if values is E4M3:
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    groups = -(-sizes.inputs // group_size)
    scales = (torch.rand(sizes.outputs, groups, generator=generator) + 0.5).to(scale).float() / float(values[-2].abs())
    scales = scales.to(scale).float()
    zeros = torch.randint(len(values), scales.shape, generator=generator).float()
    minima = {"nothing": None, "zeros": zeros * scales, "minima": scales * 3.3}[less]
    if less == "minima":
        scales[::3] = 0
    return GroupedWeight(codes, values, scales, min(group_size, sizes.inputs), minima)


def check(out: torch.Tensor, x: torch.Tensor, stored: GroupedWeight, bias: torch.Tensor | None = None) -> None:
    """Check that `out` is the result in float64, up to float32's errors in the sum and one rounding to its type."""
    dense, wide = dequantize(stored).double(), x.double().cpu()
    expected = wide @ dense.t()
    largest = dense.abs().amax(1) * 2  # with minima numbers of this size cancel out
    limit = TOLERANCE * wide.abs().sum(1)[:, None] * largest
    if bias is not None:
        expected = expected + bias.double().cpu()
    if out.dtype != F32:
        limit = limit + expected.abs() * torch.finfo(out.dtype).eps * 0.6
    error = (out.double().cpu() - expected).abs()
    assert bool((error <= limit).all()), f"off by up to {(error / limit).max():.2f} of what is allowed"


Product = Callable[[Launcher, GroupedWeight, torch.Tensor], torch.Tensor]


def product(launcher: Launcher, stored: GroupedWeight, x: torch.Tensor, dtype: torch.dtype = F32) -> torch.Tensor:
    out = torch.full((len(x), stored.shape[0]), torch.nan, dtype=dtype, device=x.device)
    kept, packed_linear.FEW_ROWS = packed_linear.FEW_ROWS, BY_CODES
    try:
        PackedLinear(launcher, GpuPackedWeight.of(stored, x.device), None).forward(x, out)
    finally:
        packed_linear.FEW_ROWS = kept
    return out


def computes(stored: GroupedWeight, dtype: torch.dtype, *counts: int, by: Product = product) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        for num_rows in counts:
            x = draw((num_rows, stored.shape[1]), dtype, device)
            check(by(launcher, stored, x), x, stored)

    return run


def every_code(values: torch.Tensor, dtype: torch.dtype, num_outputs: int = 64, by: Product = product) -> Case:
    """Each input alone gives the scaled values of its codes to the last bit, at every place in a chunk and a tile."""

    def run(launcher: Launcher, device: torch.device) -> None:
        codes = torch.arange(num_outputs * 128).view(num_outputs, 128) * 37 % len(values)
        stored = GroupedWeight(codes.to(torch.uint8), values, torch.full((num_outputs, 1), 0.25), 128)
        if values is E4M3:
            stored.codes[(stored.codes & 0x7F) == 0x7F] = 0
        out = by(launcher, stored, torch.eye(128, dtype=dtype, device=device))
        assert torch.equal(out.cpu(), dequantize(stored).t())

    return run


def a_row_by_itself(launcher: Launcher, device: torch.device) -> None:
    """A row's bits depend neither on the other rows nor on their number, which decides how blocks divide the work."""
    stored = weight(UINT4, 64, "zeros", Sizes(64, 2100))
    assert num_parts(GpuPackedWeight.of(stored, device)) == 2
    x = draw((70, 2100), BF16, device)
    together = product(launcher, stored, x)
    check(together, x, stored)
    for own in (slice(0, 1), slice(31, 34), slice(60, 70), slice(50, 70)):
        assert torch.equal(product(launcher, stored, x[own]), together[own]), own


def more_rows(dtype: torch.dtype) -> Case:
    """More rows than the kernels multiply: weights are rounded to the rows' type, and torch multiplies."""

    def run(launcher: Launcher, device: torch.device) -> None:
        for stored in (weight(UINT4, 64, "zeros"), weight(INT8, CHANNEL), weight(UINT4, 32, "minima", scale=F32)):
            x = draw((BY_CODES + 1, stored.shape[1]), dtype, device)
            rounded = dequantize(stored).to(dtype)
            wide = WidenedProducts(launcher, GpuPackedWeight.of(stored, device)).widened(16, 40, dtype).cpu()
            unit = torch.finfo(dtype).eps * dequantize(stored)[16:56].abs().clamp(min=1e-6)
            assert bool(((wide.float() - dequantize(stored)[16:56]).abs() <= 0.51 * unit).all())
            out, expected = product(launcher, stored, x, dtype), x.double().cpu() @ rounded.double().t()
            error = (out.double().cpu() - expected).abs() / expected.abs().max()
            assert float(error.max()) < 4 * torch.finfo(dtype).eps, float(error.max())

    return run


def in_slabs(launcher: Launcher, device: torch.device) -> None:
    """Weights of which only some outputs at a time fit into the memory for widened weights."""
    stored, before = weight(INT4, 32, sizes=Sizes(200, 64)), many_rows.SLAB_BYTES
    x, bias = draw((TILED_ROWS + 5, 64), F16, device), draw((200,), F16, device)
    outs = [torch.empty(len(x), 200, dtype=F16, device=device) for _ in range(2)]
    linear = PackedLinear(launcher, GpuPackedWeight.of(stored, device), bias)
    try:
        for out, many_rows.SLAB_BYTES in zip(outs, (before, 1), strict=True):
            linear.forward(x, out)
    finally:
        many_rows.SLAB_BYTES = before
    torch.testing.assert_close(*outs, rtol=2e-3, atol=2e-3)
    few = torch.empty(9, 200, dtype=F16, device=device)
    linear.forward(x[:9], few)
    torch.testing.assert_close(outs[1][:9], few, rtol=4e-3, atol=4e-3)


def float8_rows(launcher: Launcher, device: torch.device) -> None:
    """torch multiplies the codes, and rows with their scales; on a GPU that has no such product the rest of the case is
    left out."""
    stored, before = weight(E4M3, CHANNEL, sizes=Sizes(200, 90), scale=BF16), many_rows.SLAB_BYTES
    packed, bias = GpuPackedWeight.of(stored, device), draw((200,), F16, device)
    products = Float8Products(launcher, packed)
    codes = products.codes(48, 152).view(torch.uint8)
    assert torch.equal(codes[:152, :90].cpu(), stored.codes[48:])
    x = draw((TILED_ROWS + 5, 90), BF16, device)
    x[3], x[4] = 0, x[4] * 1e30
    rows, scales = quantized_rows(x, 96)
    assert not rows[:, 90:].float().any()
    rounded, size = rows[:, :90].double() * scales.double(), x.abs().amax(1, keepdim=True).double()
    assert bool(((rounded - x).abs() <= x.double().abs() / 16 + size * 2.0**-9 / 448).all())
    if device.type == "cuda" and not many_rows.multiplies_float8(device):
        return
    expected = rounded.cpu() @ dequantize(stored).double().t() + bias.double().cpu()
    try:
        for many_rows.SLAB_BYTES in (before, 1):
            out = torch.full((len(x), 200), torch.nan, dtype=F32, device=device)
            PackedLinear(launcher, packed, bias, products).forward(x, out)
            exact = expected - bias.double().cpu()
            error = (out.double().cpu() - expected).abs()
            assert bool((error <= exact.abs() * 2.0**-8 + 1e-5 * (rounded.abs().sum(1)[:, None].cpu() + 1)).all())
    finally:
        many_rows.SLAB_BYTES = before


def with_a_bias(launcher: Launcher, device: torch.device) -> None:
    """Outputs of x's type and of float32, in one part and in several, with a bias."""
    for sizes in (Sizes(), Sizes(20, 2048)):
        stored, bias = weight(INT4, 128, sizes=sizes), draw((sizes.outputs,), BF16, device, 3.0)
        linear = PackedLinear(launcher, GpuPackedWeight.of(stored, device), bias)
        x = draw((3, sizes.inputs), BF16, device)
        for dtype in (BF16, F32):
            out = torch.full((3, sizes.outputs), torch.nan, dtype=dtype, device=device)
            linear.forward(x, out)
            check(out, x, stored, bias)


def strided(launcher: Launcher, device: torch.device) -> None:
    """Rows with gaps between them, aligned and not. The columns beside the outputs keep their values."""
    for stored in (weight(INT8, CHANNEL, sizes=Sizes(75, 192)), weight(INT4, 32, sizes=Sizes(70, 2048))):
        linear = PackedLinear(launcher, GpuPackedWeight.of(stored, device), None)
        x = draw((5, stored.shape[1]), F16, device)
        plain = product(launcher, stored, x, F16)
        for gap in (8, 3):
            out = torch.full((5, stored.shape[0] + 12), torch.nan, dtype=F16, device=device)
            linear.forward(with_gaps(x, gap), out[:, 7:-5])
            assert torch.equal(out[:, 7:-5], plain)
            assert bool(out[:, :7].isnan().all() and out[:, -5:].isnan().all())
        shifted = torch.zeros(5, x.shape[1] + 8, dtype=F16, device=device)[:, 1:-7]  # no multiple of 16 bytes
        linear.forward(shifted.copy_(x), out[:, 7:-5])
        assert torch.equal(out[:, 7:-5], plain)


def sorted_columns(launcher: Launcher, device: torch.device) -> None:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(7))
    stored = weight(UINT4, 64, "zeros")._replace(order=order)
    for num_rows in (2, BY_CODES + 1):
        x = draw((num_rows, 200), F16, device)
        out = product(launcher, stored, x, F16)
        expected = x.double().cpu() @ dequantize(stored).double().t()
        assert float((out.double().cpu() - expected).abs().max() / expected.abs().max()) < 2e-3


def no_rows(launcher: Launcher, device: torch.device) -> None:
    stored = weight(INT4, 32)
    assert product(launcher, stored, torch.empty(0, 200, dtype=BF16, device=device)).shape == (0, 75)


CASES: list[tuple[str, Case]] = [
    ("int4_groups_of_128", computes(weight(INT4, 128), BF16, 1, 5, 12)),
    ("int4_groups_of_64", computes(weight(INT4, 64, scale=BF16), F16, 1, 33)),
    ("int4_groups_of_32", computes(weight(INT4, 32), BF16, 1, 12)),
    ("int4_groups_of_96", computes(weight(INT4, 96), BF16, 2)),
    ("int4_one_scale", computes(weight(INT4, CHANNEL, scale=F32), BF16, 2)),
    ("int4_zeros", computes(weight(UINT4, 128, "zeros"), BF16, 1, 12)),
    ("int4_zeros_groups_of_32", computes(weight(UINT4, 32, "zeros", scale=BF16), F16, 3)),
    ("int4_minima", computes(weight(UINT4, 32, "minima", scale=F32), BF16, 2)),
    ("int4_codes_from_0_on", computes(weight(UINT4, 64), BF16, 2)),
    ("int8_one_scale", computes(weight(INT8, CHANNEL, scale=F32), BF16, 1, 5, 33)),
    ("int8_groups", computes(weight(INT8, 32), F16, 2)),
    ("int8_zeros", computes(weight(UINT8, 128, "zeros"), BF16, 2)),
    ("int8_zeros_half", computes(weight(UINT8, 64, "zeros", scale=BF16), F16, 2)),
    ("float4", computes(weight(E2M1, 32, scale=BF16), BF16, 1, 12)),
    ("float4_half", computes(weight(E2M1, 64), F16, 2)),
    ("float8_groups", computes(weight(E4M3, 128, scale=BF16), BF16, 1)),
    ("float8_one_scale", computes(weight(E4M3, CHANNEL, scale=F32), F16, 1)),
    ("few_inputs", computes(weight(INT4, 32, sizes=Sizes(3, 9)), BF16, 1)),
    ("every_code_int4", every_code(INT4, BF16)),
    ("every_code_int4_half", every_code(INT4, F16)),
    ("every_code_int8", every_code(INT8, BF16)),
    ("every_code_int8_half", every_code(INT8, F16)),
    ("every_code_float4", every_code(E2M1, BF16)),
    ("every_code_float4_half", every_code(E2M1, F16)),
    ("every_code_float8", every_code(E4M3, BF16)),
    ("a_row_by_itself", a_row_by_itself),
    ("many_rows_bfloat16", more_rows(BF16)),
    ("many_rows_half", more_rows(F16)),
    ("in_slabs", in_slabs),
    ("float8_rows", float8_rows),
    ("with_a_bias", with_a_bias),
    ("strided", strided),
    ("sorted_columns", sorted_columns),
    ("no_rows", no_rows),
]
