"""Native products with weights that are floats of a table, on rows of bfloat16: fp8 and NF4."""

import math

import pytest
import torch

from tests.cpu.test_native_grouped import E4M3
from tests.rows import random
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.kernels.grouped import GroupedWeight, dequantize, quantize_fp8

pytestmark = [pytest.mark.skipif(not cpu.available(), reason="no native library"), pytest.mark.usefixtures("each_isa")]

E5M2 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
LOPSIDED = torch.linspace(-3, 5, 256)
"""A table that is neither symmetric nor exact in bfloat16."""
NF4 = torch.erfinv(torch.linspace(-0.96, 0.96, 16))


def each_code(values: torch.Tensor) -> GroupedWeight:
    """An output for each code, which all its weights have."""
    codes = torch.arange(len(values), dtype=torch.uint8)[:, None].repeat(1, 64)
    return GroupedWeight(codes, values, torch.full((len(values), 2), 0.5), 32)


@pytest.mark.parametrize("values", [E4M3, E5M2, LOPSIDED], ids=["e4m3", "e5m2", "lopsided"])
@pytest.mark.parametrize("num_rows", [1, 13])
def test_each_code_of_8_bits_is_exact(values: torch.Tensor, num_rows: int) -> None:
    """Denormals of fp8, both zeros, infinities and NaN have their exact values at each place of a group."""
    packed, out = PackedWeight(each_code(values)), torch.full((num_rows, 256), math.nan)
    for column in range(0, 64, 7):
        x = torch.zeros(num_rows, 64, dtype=torch.bfloat16)
        x[:, column] = 1
        linear(x, packed, out)
        finite = values.isfinite()
        assert torch.equal(out[:, finite], (values / 2)[finite].expand(num_rows, -1)), column
        assert not out[:, ~finite].isfinite().any()


@pytest.mark.parametrize("num_rows", [1, 13])
def test_values_of_4_bits_are_nearly_float32(num_rows: int) -> None:
    """A value of bfloat16 alone would be 2^-9 off."""
    packed, out = PackedWeight(each_code(NF4)), torch.full((num_rows, 16), math.nan)
    for column in range(64):
        x = torch.zeros(num_rows, 64, dtype=torch.bfloat16)
        x[:, column] = 1
        linear(x, packed, out)
        assert ((out - NF4 / 2).abs() <= (NF4 / 2).abs() * 2**-16).all(), column


def test_columns_of_every_place_count_once() -> None:
    """Integers and a scale of one: no rounding, so that a column at a wrong place cannot hide."""
    generator = torch.Generator().manual_seed(3)
    for values in (E4M3, NF4.sign() * torch.tensor([2.0**i for i in range(8, 0, -1)] + [2.0**i for i in range(1, 9)])):
        codes = torch.randint(len(values) - 1, (40, 272), generator=generator, dtype=torch.uint8)
        codes[values[codes.long()].isnan()] = 0
        weight = GroupedWeight(codes, values / 3 if len(values) == 16 else values, torch.ones(40, 17), 16)
        x = torch.randint(-8, 9, (14, 272), generator=generator).to(torch.bfloat16)
        out = torch.empty(14, 40)
        linear(x, PackedWeight(weight), out)
        expected = x.double() @ dequantize(weight).double().t()
        assert (out - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("values", [E4M3, NF4], ids=["e4m3", "nf4"])
def test_columns_may_be_in_any_order(values: torch.Tensor) -> None:
    """The result has the same bits as with rows whose elements are in that order."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(len(values) // 2 - 1, (70, 300), generator=generator, dtype=torch.uint8)
    plain = GroupedWeight(codes, values, torch.rand(70, 10, generator=generator), 32)
    order = torch.randperm(300, generator=generator)
    for num_rows in (1, 14):
        x = random(num_rows, 300, dtype=torch.bfloat16)
        ours, theirs = torch.empty(num_rows, 70), torch.empty(num_rows, 70)
        linear(x, PackedWeight(plain._replace(order=order)), ours)
        linear(x[:, order].contiguous(), PackedWeight(plain), theirs)
        assert torch.equal(ours, theirs), num_rows


@pytest.mark.parametrize("values", [E4M3, NF4], ids=["e4m3", "nf4"])
@pytest.mark.parametrize("num_inputs", [64, 576, 700, 12288 + 320])
def test_few_rows_have_the_bits_of_many(values: torch.Tensor, num_inputs: int) -> None:
    """One and two rows use several groups, and many inputs, at a time. The sizes leave remainders of both."""
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(len(values) // 2 - 1, (70, num_inputs), generator=generator, dtype=torch.uint8)
    packed = PackedWeight(GroupedWeight(codes, values, torch.rand(70, -(-num_inputs // 64), generator=generator), 64))
    x, many = random(14, num_inputs, dtype=torch.bfloat16), torch.full((14, 70), math.nan)
    linear(x, packed, many)
    for num_rows in (1, 2, 3, 12):
        for first in (0, 14 - num_rows):
            few = torch.full((num_rows, 70), math.nan)
            linear(x[first : first + num_rows], packed, few)
            assert torch.equal(few, many[first : first + num_rows]), (num_rows, first)


def test_fp8_of_a_dense_weight_is_the_nearest() -> None:
    """Within half a unit of the last place, of 3 bits or of a denormal, for the largest of a group and all others."""
    weight = random(5, 300) * torch.tensor([1e-30, 1e-3, 0, 1, 1e30])[:, None]
    weight[3, 130] = 1000
    made = quantize_fp8(weight)
    assert made.scales.shape == (5, 3)
    assert torch.equal(made.scales, made.scales.bfloat16().float())
    scales = made.scales.repeat_interleave(128, dim=1)[:, :300]
    error, allowed = (dequantize(made) - weight).abs(), torch.maximum(weight.abs() / 16, scales * 2**-10) * 1.001
    assert (error <= allowed).all()
    assert not dequantize(quantize_fp8(torch.full((1, 2), 1e-40))).any()
