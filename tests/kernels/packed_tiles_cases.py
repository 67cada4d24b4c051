"""Cases of products of 17 to 128 rows with packed quantized weights, as named functions of a launcher and a device; no
pytest in here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from tests.kernels import packed_linear_cases
from tests.kernels.cases import Case
from tests.kernels.fused_cases import draw, with_gaps
from tests.kernels.packed_linear_cases import BF16, CHANNEL, F16, F32, Sizes, check, weight
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.weights import packed_linear
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear, num_tiled_parts
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.grouped import E2M1, E4M3, INT4, INT8, UINT4, UINT8, GroupedWeight


@contextmanager
def all_in_tiles() -> Iterator[None]:
    """Any number of rows."""
    kept = packed_linear.FEW_ROWS, packed_linear.TILED_ROWS
    packed_linear.FEW_ROWS, packed_linear.TILED_ROWS = 0, 1 << 20
    try:
        yield
    finally:
        packed_linear.FEW_ROWS, packed_linear.TILED_ROWS = kept


def product(
    launcher: Launcher,
    stored: GroupedWeight,
    x: torch.Tensor,
    dtype: torch.dtype = F32,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full((len(x), stored.shape[0]), torch.nan, dtype=dtype, device=x.device)
    with all_in_tiles():
        PackedLinear(launcher, GpuPackedWeight.of(stored, x.device), bias).forward(x, out)
    return out


computes = partial(packed_linear_cases.computes, by=product)
every_code = partial(packed_linear_cases.every_code, num_outputs=320, by=product)


def a_row_by_itself(launcher: Launcher, device: torch.device) -> None:
    """A row's bits depend neither on the other rows nor on their number, which decides how blocks divide the work."""
    for stored in (weight(UINT4, 64, "zeros", Sizes(64, 2100)), weight(INT8, 96, sizes=Sizes(64, 2100))):
        assert num_tiled_parts(GpuPackedWeight.of(stored, device)) == 4
        x = draw((130, 2100), BF16, device)
        together = product(launcher, stored, x)
        check(together, x, stored)
        for own in (slice(0, 1), slice(20, 50), slice(60, 130)):
            assert torch.equal(product(launcher, stored, x[own]), together[own]), own


def with_a_bias(launcher: Launcher, device: torch.device) -> None:
    """Outputs of x's type and of float32, in one part and in several."""
    for sizes in (Sizes(300, 200), Sizes(20, 2048)):
        stored, bias = weight(INT4, 128, sizes=sizes), draw((sizes.outputs,), BF16, device, 3.0)
        x = draw((19, sizes.inputs), BF16, device)
        for dtype in (BF16, F32):
            check(product(launcher, stored, x, dtype, bias), x, stored, bias)


def nan_stays_in_its_output(launcher: Launcher, device: torch.device) -> None:
    """An incomplete last step reads nothing of the next tile, and the last step of a part nothing of the next part."""
    for inputs in (96, 1056):
        stored = weight(E4M3, CHANNEL, sizes=Sizes(40, inputs), scale=BF16)
        stored.codes[16:, :] = 0x7F
        out = product(launcher, stored, draw((17, inputs), BF16, device))
        assert bool(out[:, :16].isfinite().all() and out[:, 16:].isnan().all())


def strided(launcher: Launcher, device: torch.device) -> None:
    """Rows with gaps between them. The columns beside the outputs keep their values."""
    stored = weight(INT8, CHANNEL, sizes=Sizes(75, 192))
    linear = PackedLinear(launcher, GpuPackedWeight.of(stored, device), None)
    x = draw((18, 192), F16, device)
    out = torch.full((18, 75 + 12), torch.nan, dtype=F16, device=device)
    with all_in_tiles():
        linear.forward(with_gaps(x, 8), out[:, 7:-5])
    assert torch.equal(out[:, 7:-5], product(launcher, stored, x, F16))
    assert bool(out[:, :7].isnan().all() and out[:, -5:].isnan().all())


CASES: list[tuple[str, Case]] = [
    ("int4_groups_of_128", computes(weight(INT4, 128, sizes=Sizes(300, 200)), BF16, 17, 40, 128)),
    ("int4_groups_of_32", computes(weight(INT4, 32, scale=BF16), F16, 33)),
    ("int4_groups_of_96", computes(weight(INT4, 96), BF16, 17)),
    ("int4_one_scale", computes(weight(INT4, CHANNEL, scale=F32), BF16, 17)),
    ("int4_zeros", computes(weight(UINT4, 128, "zeros"), BF16, 17)),
    ("int4_minima", computes(weight(UINT4, 32, "minima", Sizes(320, 520), scale=F32), BF16, 17)),
    ("int8_one_scale", computes(weight(INT8, CHANNEL, sizes=Sizes(75, 600), scale=F32), BF16, 17, 70)),
    ("int8_groups", computes(weight(INT8, 32), F16, 17)),
    ("int8_zeros", computes(weight(UINT8, 128, "zeros"), BF16, 17)),
    ("float4", computes(weight(E2M1, 32, scale=BF16), BF16, 17)),
    ("float8_groups", computes(weight(E4M3, 128, scale=BF16), BF16, 17)),
    ("few_inputs", computes(weight(INT8, 32, sizes=Sizes(3, 9)), BF16, 17)),
    ("every_code_int4", every_code(INT4, BF16)),
    ("every_code_int8_half", every_code(INT8, F16)),
    ("a_row_by_itself", a_row_by_itself),
    ("with_a_bias", with_a_bias),
    ("strided", strided),
    ("nan_stays_in_its_output", nan_stays_in_its_output),
]
