"""Groups of a row's inputs, which native products quantize several at a time, on every instruction set."""

import pytest
import torch

from tests.cpu.test_native_grouped import grouped, rounded_as_for
from tests.rows import random
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear, multiplies_bytes
from vllm_lite.kernels.grouped import INT4, INT5, INT8, dequantize

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")


@pytest.mark.parametrize("values", [INT4, INT5, INT8], ids=["int4", "int5", "int8"])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 8, 11, 13])
def test_each_group_has_a_scale_and_large_numbers_of_its_own(
    each_isa: str, num_rows: int, values: torch.Tensor
) -> None:
    """Groups that are quantized together do not mix, whatever their sizes: each output multiplies one of them."""
    num_groups, num_inputs = 36, 32 * 35 + 8
    weight = grouped(num_groups, num_inputs, 32, values)
    own = torch.arange(num_inputs) // 32 == torch.arange(num_groups)[:, None]
    weight.codes[~own] = values.tolist().index(0)
    groups = random(num_rows * num_groups, 32)
    place = torch.arange(len(groups))
    groups[place % 3 == 1, :] *= 0.01
    groups[place[::2], place[::2] * 7 % 32] *= 40
    groups[place[::4], place[::4] * 5 % 32] = 11
    groups[place % 7 == 2, 8:] = 0
    groups[place % 11 == 3, :] = 0
    x = groups.view(num_rows, -1)[:, :num_inputs].to(FLOATS[num_rows % 3])
    out = torch.empty(num_rows, num_groups)
    linear(x, PackedWeight(weight), out)
    rounded = rounded_as_for(weight, x) if multiplies_bytes() else x
    dense = dequantize(weight).double()
    expected, size = rounded.double() @ dense.t(), rounded.double().abs() @ dense.abs().t()
    assert ((out - expected).abs() <= 1e-5 * size).all(), each_isa


@pytest.mark.parametrize("values", [INT4, INT5, INT8], ids=["int4", "int5", "int8"])
@pytest.mark.parametrize("group_size", [32, 256])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_only_one_four_of_a_group_has_inputs(
    each_isa: str, num_rows: int, group_size: int, values: torch.Tensor
) -> None:
    """Whichever it is, it counts once, also where another one is chosen beside it for its large numbers."""
    num_inputs = group_size + 32
    weight = PackedWeight(unpacked := grouped(16, num_inputs, group_size, values))
    dense = dequantize(unpacked).double()
    for place in range(0, num_inputs, 4):
        x = torch.zeros(num_rows, num_inputs)
        x[:, place : place + 4] = random(num_rows, 4) + 3
        out = torch.empty(num_rows, 16)
        linear(x, weight, out)
        largest = x.double().abs().amax(1, keepdim=True) * dense[:, place : place + 4].abs().sum(1)
        assert ((out - x.double() @ dense.t()).abs() <= 0.01 * largest + 1e-6).all(), (each_isa, place)
