"""Native products with grouped weights of 4 and 8 bits, on every instruction set, against float64."""

import itertools
import math

import pytest
import torch

from tests.cpu.conftest import has_amx, using_isa
from tests.cpu.rounded_rows import LARGEST_OF_TWO, rounded_rows
from tests.rows import random
from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.weights import grouped as cpu_grouped
from vllm_lite.kernels.cpu.weights.linear import QUANT_GROUP, PackedWeight, linear, multiplies_bytes
from vllm_lite.kernels.grouped import INT4, INT5, INT8, UINT4, UINT5, GroupedWeight, dequantize, quantize4
from vllm_lite.layers.weights.matmul import make_grouped_matmul

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NORMAL = torch.linspace(-1, 1, 16).pow(3)
"""No whole numbers, in whatever unit."""
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
IQ4_NL = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
"""Whole numbers whose bytes are too large for sums of four products in 16 bits."""
FROM_100 = torch.arange(256.0) - 100
"""Whole numbers that differ from bytes by an amount that is not a multiple of 128."""
WHOLE = (INT4, UINT4, MXFP4, IQ4_NL, INT5, UINT5, INT8, FROM_100)

# outputs, inputs, group size, rows: whole blocks and parts of them, parts of groups, several tiles, groups and tasks
SHAPES = [
    (1, 1, 32, 1),
    (32, 128, 128, 3),
    (40, 48, 16, 12),
    (33, 257, 32, 13),
    (300, 600, 64, 4),
    (70, 1025, 1025, 97),
]


def grouped(
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    values: torch.Tensor = INT4,
    *,
    minima: bool = False,
    scales: torch.dtype = torch.float32,
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    codes = torch.randint(len(values), (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    codes[values[codes.long()].isnan()] = 1
    shape = num_outputs, -(-num_inputs // group_size)
    own = (0.5 + torch.rand(shape, generator=generator)).to(scales).float()
    least = torch.randn(shape, generator=generator) if minima else None
    return GroupedWeight(codes, values, own, group_size, least)


def rounded_as_for(weight: GroupedWeight, x: torch.Tensor) -> torch.Tensor:
    """A group that is not a size of the kernels' is taken apart into groups of the largest."""
    group_size = min(weight.group_size, QUANT_GROUP)
    ordered = x if weight.order is None else x[:, weight.order]
    rounded = rounded_rows(ordered, group_size, bits=4 if len(weight.values) == 16 else 8)
    return rounded if weight.order is None else rounded[:, weight.order.argsort()]


def check(weight: GroupedWeight, x: torch.Tensor, bias: torch.Tensor | None, label: object) -> None:
    whole = any(weight.values is values for values in WHOLE)
    check_packed(PackedWeight(weight, bias), weight, x, bias, label, whole=whole)


def check_packed(
    packed: PackedWeight,
    weight: GroupedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    label: object,
    *,
    whole: bool = True,
) -> None:
    out = torch.full((len(x), weight.shape[0]), math.nan)
    linear(x, packed, out)
    rounded = rounded_as_for(weight, x) if whole and multiplies_bytes() else x
    dense = dequantize(weight).double()
    expected = rounded.double() @ dense.t() + (0 if bias is None else bias.double())
    size = (rounded.double().abs() @ (dense.abs() + 20).t()).max()  # the part of the minima counts, too
    assert (out - expected).abs().max() < 1e-6 * size, label


@pytest.mark.parametrize(
    "values",
    [INT4, UINT4, MXFP4, IQ4_NL, NORMAL, INT5, UINT5, INT8, E4M3],
    ids=["int4", "uint4", "mxfp4", "iq4_nl", "table", "int5", "uint5", "int8", "e4m3"],
)
@pytest.mark.parametrize("minima", [False, True])
def test_equals_float64(each_isa: str, values: torch.Tensor, minima: bool) -> None:
    for i, (num_outputs, num_inputs, group_size, num_rows) in enumerate(SHAPES):
        kind = FLOATS[i % 3]
        weight = grouped(num_outputs, num_inputs, group_size, values, minima=minima, scales=FLOATS[i // 2])
        x, bias = random(num_rows, num_inputs, dtype=kind), random(num_outputs)
        check(weight, x, bias if i % 2 == 0 else None, (each_isa, SHAPES[i]))


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("num_rows", [1, 4, 6, 11, 40])
def test_groups_of_8_and_of_15_bits_lie_side_by_side(each_isa: str, num_rows: int, group_size: int) -> None:
    """A group whose largest value is far larger than the others has some numbers in 15 bits, and does not change other
    rows: each has the bits that it has alone."""
    x = random(num_rows, 200)
    x[::3, 40] *= 1000
    x[1::4, 90:] *= 1e-20
    x[2::4, 190] = 50
    for minima, values in itertools.product((False, True), (INT5, INT8, FROM_100)):
        weight = grouped(40, 200, group_size, values, minima=minima)
        packed = PackedWeight(weight)
        check_packed(packed, weight, x, None, (each_isa, minima, values[0]))
        together, alone = torch.empty(num_rows, 40), torch.empty(num_rows, 40)
        linear(x, packed, together)
        for row in range(num_rows):
            linear(x[row : row + 1], packed, alone[row : row + 1])
        assert torch.equal(together, alone)


@pytest.mark.parametrize("num_rows", [1, 4, 8, 9, 40, 200])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 200), (33, 128), (70, 1100)])
def test_rows_have_8_bits_in_groups_of_128_too(each_isa: str, num_rows: int, num_outputs: int, num_inputs: int) -> None:
    """With weights that became int8 when they were loaded, and VNNI; elsewhere 15 bits. Each row has the bits that it
    has alone."""
    packed = PackedWeight(random(num_outputs, num_inputs), form="int8_g128")
    x = random(num_rows, num_inputs, dtype=torch.bfloat16)
    x[::3, 40] *= 1000
    x[1::4, 90:] *= 1e-20
    x[2::4, 10:30:3] = 50  # several are the largest
    x[3::5] = 0
    weight, together = torch.empty(num_outputs, num_inputs), torch.empty(num_rows, num_outputs)
    packed.rows(torch.arange(num_outputs), weight)
    linear(x, packed, together)
    rounded = rounded_rows(x, QUANT_GROUP, byte_rows=True) if multiplies_bytes() else x
    expected = rounded.double() @ weight.double().t()
    sizes = (rounded.double().abs() @ (weight.double().abs() + 4).t()).amax(1, keepdim=True)
    assert ((together - expected).abs() <= 1e-6 * sizes).all(), each_isa
    alone = torch.empty(num_rows, num_outputs)
    for row in range(num_rows):
        linear(x[row : row + 1], packed, alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("values", "minima"), [(INT4, False), (MXFP4, True), (INT5, True), (INT8, True), (NORMAL, False), (E4M3, False)]
)
def test_results_do_not_depend_on_other_rows_or_threads(each_isa: str, values: torch.Tensor, minima: bool) -> None:
    """Bit for bit: each output is one chain of additions, whatever is computed beside it."""
    packed = PackedWeight(grouped(100, 1100, 32, values, minima=minima))
    x = random(200, 1100, dtype=torch.bfloat16)
    whole, before = torch.empty(200, 100), cpu.num_threads()
    linear(x, packed, whole)
    for num_rows in (1, 2, 7, 12, 13, 25, 97):
        cpu.set_num_threads(1 + num_rows % 3)
        part = torch.empty(num_rows, 100)
        linear(x[-num_rows:], packed, part)
        assert torch.equal(part, whole[-num_rows:]), (each_isa, num_rows)
    cpu.set_num_threads(before)


@pytest.mark.usefixtures("each_isa")
def test_whole_rows_are_exact() -> None:
    """Integers that are their own quantization: no rounding anywhere."""
    weight = grouped(48, 320, 64)._replace(scales=torch.full((48, 5), 0.5))
    x = torch.randint(-127, 128, (20, 320), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127
    out = torch.empty(20, 48)
    linear(x, PackedWeight(weight), out)
    assert torch.equal(out, x @ dequantize(weight).t())


@pytest.mark.parametrize("values", [NORMAL, E4M3], ids=["table", "e4m3"])
@pytest.mark.usefixtures("each_isa")
def test_every_code_has_its_float(values: torch.Tensor) -> None:
    codes = (torch.arange(256) % len(values)).to(torch.uint8).reshape(2, 128)
    weight = GroupedWeight(codes, values, torch.ones(2, 1), 128)
    out = torch.empty(128, 2)
    linear(torch.eye(128), PackedWeight(weight), out)
    if values is E4M3:
        assert out.isnan().all(), "each output has one weight that is not a number"
        weight.codes[:, 127] = 0
        linear(torch.eye(128), PackedWeight(weight), out)
    assert torch.equal(out, dequantize(weight).t())


@pytest.mark.parametrize("zero", [None, -60, -24, 24, 60])
@pytest.mark.parametrize("values", [INT4, MXFP4, IQ4_NL, INT5, INT8], ids=["int4", "mxfp4", "iq4_nl", "int5", "int8"])
@pytest.mark.usefixtures("each_isa")
def test_the_largest_bytes_and_integers_are_exact(values: torch.Tensor, zero: int | None) -> None:
    """No sum on the way leaves its 16 bits, and the least byte has no sign that is lost."""
    ends = torch.tensor([int(values.argmin()), int(values.argmax())], dtype=torch.uint8)
    for group_size, num_rows, same in ((32, 1, 1), (32, 18, 2), (128, 3, 2), (128, 6, 64)):  # outputs with the same end
        codes = ends[torch.arange(64)[:, None] // same % 2].expand(64, 256).contiguous()
        weight = GroupedWeight(codes, values, torch.ones(64, 256 // group_size), group_size)
        if zero is not None:
            zeros = torch.zeros_like(weight.scales)
            zeros[0], zeros[1] = zero, -zero
            weight = with_zero_points(weight, zeros)
        x = torch.full((num_rows, 256), 127.0)
        x[::2] = -127
        x[-1, ::2] = 127
        out = torch.empty(num_rows, 64)
        linear(x, PackedWeight(weight), out)
        assert torch.equal(out.double(), x.double() @ dequantize(weight).double().t()), (group_size, num_rows)


@pytest.mark.parametrize("values", [INT4, UINT4, MXFP4, INT8], ids=["int4", "uint4", "mxfp4", "int8"])
@pytest.mark.parametrize("kind", ["plain", "minima", "zero points"])
@pytest.mark.usefixtures("two_threads")
def test_tiles_add_groups_up_as_vectors_do(values: torch.Tensor, kind: str) -> None:
    """Bit for bit, in more than one part of the inputs and of the rows, in more than one task: few rows go by vectors.
    So do vectors of one width with VNNI and without."""
    weight = grouped(300, 1300, 128, values, minima=kind == "minima", scales=torch.bfloat16)
    if kind == "zero points":
        zeros = torch.randint(-3, 17, weight.scales.shape, generator=torch.Generator().manual_seed(5)).float()
        weight = with_zero_points(weight, zeros)
    packed = PackedWeight(weight, random(300))
    for num_rows in (13, 33, 270):
        x = random(num_rows, 1300, dtype=torch.bfloat16)
        for isas in (("avx512_bf16", "avx512"), ("amx_emulated", *(["amx"] if has_amx() else []))):
            outs = []
            for isa in isas:
                for _ in using_isa(isa):
                    outs.append(torch.full((num_rows, 300), math.nan))
                    linear(x, packed, outs[-1])
                    few = torch.empty(6, 300)
                    linear(x[-6:], packed, few)
                    assert torch.equal(few, outs[0][-6:]), (num_rows, isa)
            assert all(torch.equal(outs[0], out) for out in outs[1:]), num_rows


SHORT_GROUPS = [
    (INT4, 32, "plain"),
    (UINT4, 32, "minima"),
    (UINT4, 16, "zero points"),
    (IQ4_NL, 32, "plain"),
    (UINT5, 32, "minima"),
    (INT8, 32, "minima"),
    (FROM_100, 16, "plain"),
]


@pytest.mark.parametrize(("values", "group_size", "kind"), SHORT_GROUPS)
@pytest.mark.usefixtures("two_threads")
def test_tiles_of_short_groups_add_them_up_as_vectors_do(values: torch.Tensor, group_size: int, kind: str) -> None:
    """Bit for bit, with one plane and with two, in parts of the inputs, with 1 to 32 rows at a time."""
    weight = grouped(70, 600, group_size, values, minima=kind == "minima", scales=torch.bfloat16)
    if kind == "zero points":
        zeros = torch.randint(-3, 17, weight.scales.shape, generator=torch.Generator().manual_seed(5)).float()
        weight = with_zero_points(weight, zeros)
    packed = PackedWeight(weight, random(70))
    for num_rows in (17, 64 + 8, 256 + 31):
        check_rows_as_alone(packed, uneven_rows(num_rows, 600))


@pytest.mark.parametrize("form", ["int4_g32", "int5_g32"])
def test_tiles_add_groups_with_scales_of_bytes_up_as_vectors_do(form: Form) -> None:
    check_rows_as_alone(PackedWeight(random(70, 600), form=form), uneven_rows(33, 600))


def uneven_rows(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Rows with groups, some of one row and some of all, for which 8 bits are too few; and one row with infinity and
    NaN."""
    x = random(num_rows, num_inputs)
    x[:, 40], x[5:7, 300] = 90, -50
    x[-1, 3], x[-1, 400] = math.inf, math.nan
    return x.bfloat16()


def check_rows_as_alone(weight: PackedWeight, x: torch.Tensor) -> None:
    """Compare tiles, the processor's and those in plain C++, with products of a few rows by vectors."""
    for isa in ("amx_emulated", *(["amx"] if has_amx() else [])):
        for _ in using_isa(isa):
            together, alone = torch.full((2, len(x), weight.num_outputs), math.nan)
            linear(x, weight, together)
            for first in range(0, len(x), 6):
                linear(x[first : first + 6], weight, alone[first : first + 6])
            assert alone[:-1].isfinite().all()
            assert torch.equal(together.nan_to_num(nan=7), alone.nan_to_num(nan=7)), isa


@pytest.mark.usefixtures("two_threads")
def test_tiles_equal_float64_as_vectors_do() -> None:
    for num_rows in (3, 40):
        for _ in using_isa("amx_emulated"):
            for values, group_size in ((INT4, 128), (INT8, 128), (INT4, 32), (INT8, 16)):
                check(grouped(70, 300, group_size, values), random(num_rows, 300), random(70), num_rows)


@pytest.mark.parametrize(("values", "group_size"), [(INT4, 32), (INT4, 128), (INT5, 32), (INT8, 16), (INT8, 128)])
@pytest.mark.usefixtures("each_isa")
def test_channels_far_larger_than_others_leave_them_as_they_are(values: torch.Tensor, group_size: int) -> None:
    """With 4 bits, large channels affect only their own 32 inputs; with 8 bits, none."""
    weight, x = grouped(64, 384, group_size, values), random(14, 384)
    weight.codes[:, [5, 200]] = values.tolist().index(0)
    if values is INT4:
        x[:, 0:32] = x[:, 192:224] = 0
    expected, out = x.double() @ dequantize(weight).double().t(), torch.empty(14, 64)
    x[:, [5, 200]] = 300
    linear(x, PackedWeight(weight), out)
    assert (out - expected).norm() < (0.02 if values is INT4 else 0.006) * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 3, 7, 14])
@pytest.mark.usefixtures("each_product_isa")
def test_both_planes_of_the_largest_rows_count(num_rows: int) -> None:
    """The upper plane at its ends beside the lower one at each of its own: sums stay below 2^31."""
    signs = torch.tensor([1.0, -1.0])
    codes = (torch.arange(64)[:, None] % 2 * 254 + 1).to(torch.uint8).expand(64, 256).contiguous()
    weight = GroupedWeight(codes, INT8, torch.ones(64, 1), 256)
    for less in (0, 1, 127, 128):
        x = torch.full((num_rows, 256), float(LARGEST_OF_TWO - less)) * signs[torch.arange(num_rows) % 2, None]
        x[:, ::128] = LARGEST_OF_TWO
        out = torch.empty(num_rows, 64)
        linear(x, PackedWeight(weight), out)
        torch.testing.assert_close(out.double(), x.double() @ dequantize(weight).double().t(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.usefixtures("each_product_isa")
def test_rows_of_any_size_keep_their_relative_error(group_size: int) -> None:
    """Huge, tiny and zero rows do; what is not a number stays none, in its own row only."""
    weight, x = grouped(64, 300, group_size, INT8), random(18, 300)
    x[1], x[2], x[3] = 0, x[0] * 1e-30, x[0] * 1e30
    x[4, 200], x[5, 7] = math.nan, math.inf
    out = torch.empty(18, 64)
    linear(x, PackedWeight(weight), out)
    assert (out[1] == 0).all()
    size = float(out[0].abs().max())
    torch.testing.assert_close(out[2] * 1e30, out[0], rtol=1e-4, atol=1e-5 * size)
    torch.testing.assert_close(out[3] / 1e30, out[0], rtol=1e-4, atol=1e-5 * size)
    assert out[:4].isfinite().all()
    assert not out[4:6].isfinite().any()


def with_zero_points(weight: GroupedWeight, zeros: torch.Tensor) -> GroupedWeight:
    return weight._replace(minima=zeros * weight.scales)


@pytest.mark.parametrize(("group_size", "bits"), [(128, 4 + 24 / 128), (32, 4 + 24 / 32)])
@pytest.mark.parametrize("values", [UINT4, INT4], ids=["uint4", "int4"])
def test_zero_points_take_a_byte(each_isa: str, values: torch.Tensor, group_size: int, bits: float) -> None:
    """The result is as exact as with the equivalent symmetric integers."""
    for num_rows in (1, 5, 40):
        plain = grouped(96, 640, group_size, values, scales=torch.bfloat16)
        zeros = torch.randint(-3, 17, plain.scales.shape, generator=torch.Generator().manual_seed(5)).float()
        zeros[0], plain.scales[3, 1] = -3, 0
        weight = with_zero_points(plain, zeros)
        packed, table = PackedWeight(weight), 4 * 16 * 8
        assert packed.num_bytes * 8 == 96 * 640 * bits + table
        check(weight, random(num_rows, 640), random(96), (each_isa, num_rows))
        rows = torch.empty(96, 640)
        packed.rows(torch.arange(96), rows)
        assert torch.equal(rows, dequantize(weight))


def test_minima_that_are_no_zero_points_stay_floats() -> None:
    plain = grouped(96, 640, 128, UINT4, scales=torch.float16)
    for zeros in (torch.full((96, 5), 7.5), torch.full((96, 5), 25.0), torch.full((96, 5), -25.0)):
        weight = with_zero_points(plain, zeros)
        assert PackedWeight(weight).num_bytes > 96 * 640 * (4 + 24 / 128) / 8 + 4 * 16
        check(weight, random(3, 640), None, zeros[0, 0])


@pytest.mark.parametrize("values", [INT4, NORMAL, INT5, INT8], ids=["int4", "table", "int5", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("each_isa")
def test_columns_may_be_in_any_order(values: torch.Tensor, dtype: torch.dtype) -> None:
    """The same bits as with rows whose elements are in that order."""
    for num_rows in (1, 14):
        plain, x = grouped(70, 300, 32, values, minima=True), random(num_rows, 300, dtype=dtype)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(7))
        ours, theirs = torch.empty(num_rows, 70), torch.empty(num_rows, 70)
        packed = PackedWeight(plain._replace(order=order))
        linear(x, packed, ours)
        linear(x[:, order].contiguous(), PackedWeight(plain), theirs)
        assert torch.equal(ours, theirs), num_rows
    rows = torch.empty(70, 300, dtype=dtype)
    packed.rows(torch.arange(70), rows)
    assert torch.equal(rows, dequantize(plain._replace(order=order)).to(dtype))


@pytest.mark.parametrize("values", [INT4, NORMAL, INT5, INT8], ids=["int4", "table", "int5", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("each_isa")
def test_rows_can_be_looked_up(values: torch.Tensor, dtype: torch.dtype) -> None:
    weight = grouped(70, 100, 32, values, minima=True)
    ids = torch.tensor([69, 0, 31, 32, 69])
    out = torch.full((5, 110), 7.0, dtype=dtype)
    PackedWeight(weight).rows(ids, out[:, :100])
    assert torch.equal(out[:, :100], dequantize(weight)[ids].to(dtype))
    assert (out[:, 100:] == 7).all()


def test_scales_are_kept_exactly_and_as_short_as_they_are() -> None:
    """Bits of a weight: 4, and the group's scale and minimum divided by its size."""
    bits = []
    for scales in (torch.bfloat16, torch.float16, torch.float32):
        for group_size in (32, 128):
            packed = PackedWeight(grouped(64, 1024, group_size, scales=scales))
            bits.append(packed.num_bytes * 8 / (64 * 1024))
    table = 16 * 4 * 8 / (64 * 1024)
    assert bits == [one + table for one in (4.5, 4.125, 4.5, 4.125, 5.0, 4.25)]


@pytest.mark.parametrize("values", [INT5, UINT5], ids=["int5", "uint5"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_of_5_bits_are_read_by_products_with_exact_rows(
    each_isa: str, values: torch.Tensor, dtype: torch.dtype
) -> None:
    for num_rows, group_size in ((1, 32), (3, 16), (14, 128)):
        weight = grouped(70, 300, group_size, values, minima=values is UINT5)
        packed, x = PackedWeight(weight), random(num_rows, 300, dtype=dtype)
        packed.keep_rows()
        check_packed(packed, weight, x, None, (each_isa, num_rows), whole=False)


def test_codes_of_5_bits_have_no_table() -> None:
    """They take 5 bits: a nibble, and a separate fifth bit."""
    weight = grouped(64, 1024, 32, INT5, scales=torch.float16)
    assert PackedWeight(weight).num_bytes * 8 == 64 * 1024 * 5.5 + 32 * 32
    assert not PackedWeight.takes(weight._replace(values=torch.linspace(-1, 1, 32)))


def test_weights_without_a_kernel_are_refused() -> None:
    plain = grouped(4, 200, 32)
    assert PackedWeight.takes(plain)
    for wrong in (plain._replace(group_size=24, scales=torch.ones(4, 9)), plain._replace(values=torch.arange(8.0))):
        assert not PackedWeight.takes(wrong)
        with pytest.raises(ValueError, match="a grouped weight must have 16, 256 or 32 whole values, and groups"):
            PackedWeight(wrong)
    for order in (torch.arange(199), torch.arange(200) + 1, torch.zeros(200, dtype=torch.int64)):
        with pytest.raises(ValueError, match="each of the 200 inputs once"):
            PackedWeight(plain._replace(order=order))
    with pytest.raises(ValueError, match=r"codes must be a matrix of bytes on the CPU, got torch\.int64 \[4, 200\]"):
        PackedWeight(plain._replace(codes=plain.codes.long()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_inputs", "group_size"), [(96, 32), (200, 128), (33, 32), (384, 128)])
def test_weights_become_the_integers_of_the_best_scale(dtype: torch.dtype, num_inputs: int, group_size: int) -> None:
    weight = torch.randn(37, num_inputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight[5], weight[6, :9] = 0, 0
    native, plain = cpu_grouped.quantize4(weight, group_size), quantize4(weight, group_size)
    spread = native.scales.repeat_interleave(group_size, 1)[:, :num_inputs]
    integers = (weight.float() * torch.where(spread != 0, 1 / spread, 0)).round().clamp(-8, 7)
    assert torch.equal(native.codes, (integers + 8).to(torch.uint8))
    assert torch.equal(native.scales, native.scales.bfloat16().float())
    exact = weight.float()
    errors = [(dequantize(each) - exact).square().sum(1) for each in (native, plain)]
    torch.testing.assert_close(errors[0], errors[1], rtol=2e-2, atol=1e-6)  # of two largest either may come first
    torch.testing.assert_close(errors[0].sum(), errors[1].sum(), rtol=1e-3, atol=0)
    simple = exact.abs().amax(1, keepdim=True) / 7
    rounded = torch.where(simple > 0, exact / simple, 0).round() * simple
    assert errors[0].sum() < 0.9 * (rounded - exact).square().sum()


def test_a_weight_of_the_largest_size_may_be_negative_or_positive() -> None:
    for sign in (1, -1):
        weight = sign * torch.tensor([[*range(-8, 8), *range(-8, 8)]], dtype=torch.float32)
        for made in (cpu_grouped.quantize4(weight, 32), quantize4(weight, 32)):
            assert torch.equal(dequantize(made), weight)


def test_weights_that_become_dense_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    codes = torch.zeros(4, 48, dtype=torch.uint8)
    odd = GroupedWeight(codes, INT4, torch.ones(4, 2), 24)
    with caplog.at_level("INFO"):
        for _ in range(2):
            make_grouped_matmul(odd, None, torch.float32, torch.device("cpu"))
    assert caplog.messages == ["weights of 4 bits in groups of 24 become float32: cpu has no kernel for them"]
