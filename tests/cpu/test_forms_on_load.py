"""Dense weights quantized by `--quantization`: natively as by the plain twin, how far off, in how many bytes."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.isas import isa_in_use
from tests.rows import random
from vllm_lite.checkpoint.quantization.on_load import Form, quantized_bytes
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.file_packer import group_size
from vllm_lite.kernels.cpu.weights.grouped import quantize4 as native_quantize4
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear, multiplies_bytes
from vllm_lite.kernels.grouped import VALUES, GroupedWeight, dequantize, quantize, quantize4, quantize_on_gpu
from vllm_lite.layers.weights.matmul import NativeMatmul, make_matmul

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

FORMS: tuple[Form, ...] = ("int8", "int8_g128", "fp8", "int4", "int4_g32", "int5_g32")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BAD = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("num_inputs", [320, 384, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_has_their_memory(form: Form, num_inputs: int) -> None:
    made = make_matmul(random(64, num_inputs), None, form)
    assert isinstance(made, NativeMatmul)
    taken = made.packed.num_bytes - 4 * len(VALUES[form])  # the table of values is kept beside
    planned = quantized_bytes((64, num_inputs), form)
    if form == "int8":  # with tiles groups have 128 inputs: plans are made for machines with them and without
        by_group = {size: 64 * -(-num_inputs // size) * (size + 4) for size in (32, 128)}
        assert taken == by_group[group_size(form)]
        taken = max(by_group.values())
    assert planned == taken


def stands_for(weight: PackedWeight) -> torch.Tensor:
    out = torch.empty(weight.num_outputs, weight.num_inputs)
    weight.rows(torch.arange(weight.num_outputs), out)
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_weights_are_quantized_as_by_plain_torch(each_isa: str, form: Form, dtype: torch.dtype) -> None:
    for shape in ((37, 96), (64, 200), (33, 33), (5, 576)):
        check_against_the_plain_twin(random(*shape, dtype=dtype), form)


def check_against_the_plain_twin(weight: torch.Tensor, form: Form) -> None:
    """Equal, but for weights that lie between two codes, and scales that are as good."""
    weight[:, 3] *= 20
    weight[2], weight[3], weight[4, :9] = 0, 0.25, -0.5
    exact = weight.float()
    plain = dequantize(quantize(weight, form, group_size=group_size(form)))
    native = stands_for(PackedWeight(weight, form=form))
    errors = [(made - exact).square().sum() for made in (native, plain)]
    torch.testing.assert_close(errors[0], errors[1], rtol=5e-3, atol=0)
    assert ((native - plain).abs() > 1e-3 * (exact.abs() + 1)).float().mean() < 0.12, weight.shape
    assert torch.equal(native[2], exact[2])
    torch.testing.assert_close(native[3], exact[3], rtol=4e-3, atol=0)


@pytest.mark.parametrize(
    ("form", "most"),
    [
        ("int8", 0.0061),
        ("int8_g128", 0.0083),
        ("fp8", 0.0253),
        ("int4", 0.1155),
        ("int4_g32", 0.0791),
        ("int5_g32", 0.0385),
    ],
)
def test_the_error_of_a_form(form: Form, most: float) -> None:
    """Errors of normal weights, and of products of two. With the range of a group in 15 steps 4 bits would give 0.125
    and 0.089, and 8 bits with the largest at 127 0.0065."""
    generator = torch.Generator().manual_seed(0)
    normal, flat = (torch.randn(256, 1024, generator=generator) for _ in range(2))
    weight = torch.cat([normal, flat.sign() * (flat.abs() * normal.abs())])
    with isa_in_use("avx2"):  # tiles want larger groups of 8 bits
        error = stands_for(PackedWeight(weight, form=form)) - weight
    assert error.norm() < most * weight.norm()


def test_weights_on_a_grid_of_their_own_are_found(each_isa: str) -> None:
    """Each group of 32 has 16 levels, like blocks of Q4_1; bytes represent scales and minima exactly."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (64, 8, 32), generator=generator)
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    scales, minima = (torch.randint(1, 128, (64, 8, 1), generator=generator).float() for _ in range(2))
    scales[:, 0], minima[:, 0] = 127, 127
    weight = (codes * scales - minima).flatten(1)
    torch.testing.assert_close(stands_for(PackedWeight(weight, form="int4_g32")), weight, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_nan_weights_stay_nan_in_their_places(each_isa: str, form: Form) -> None:
    weight = random(40, 256)
    weight[7, 5], weight[8, 5], weight[9] = float("nan"), float("inf"), float("nan")
    made = stands_for(PackedWeight(weight, form=form))
    others = [row for row in range(40) if row not in (7, 8, 9)]
    assert made[9].isnan().all()
    assert made[others].isfinite().all()
    assert torch.equal(made[others], stands_for(PackedWeight(weight[others], form=form)))


@pytest.mark.parametrize("form", FORMS)
def test_one_nan_weight_is_kept_in_its_group(each_isa: str, form: Form) -> None:
    """Wherever it is: a group's range, or its best scale, must not be found without it."""
    x = random(3, 328)
    for bad, place in product(BAD, (0, 5, 31, 150, 255, 300, 327)):
        weight, out = random(40, 328), torch.empty(3, 40)
        weight[7, place] = bad
        packed = PackedWeight(weight, form=form)
        linear(x, packed, out)
        assert not stands_for(packed)[7, place].isfinite(), (bad, place)
        assert not out[:, 7].isfinite().any(), (bad, place)
        assert out[:, [*range(7), *range(8, 40)]].isfinite().all()


@pytest.mark.parametrize("form", ["int8", "int8_g128", "int4", "int4_g32", "int5_g32"])
def test_a_range_beyond_float_becomes_nan(each_isa: str, form: Form) -> None:
    weight = random(40, 256)
    weight[7, 3], weight[7, 4] = 3e38, -3e38
    made = stands_for(PackedWeight(weight, form=form))
    assert not made[7, 3:5].isfinite().any()
    assert made[[*range(7), *range(8, 40)]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plain", [quantize, quantize_on_gpu], ids=["cpu", "gpu"])
def test_the_torch_references_keep_nan_weights(
    plain: Callable[[torch.Tensor, Form], GroupedWeight], form: Form
) -> None:
    for bad, place in product(BAD, (0, 5, 31, 150, 255)):
        weight = random(4, 256)
        weight[2, place] = bad
        made = dequantize(plain(weight, form))
        assert not made[2, place].isfinite(), (bad, place)
        assert made[[0, 1, 3]].isfinite().all()


def test_symmetric_codes_keep_nan_weights(each_isa: str) -> None:
    for bad, place in product(BAD, (0, 5, 31, 40)):
        weight = random(4, 64)
        weight[2, place] = bad
        for made in (quantize4(weight, 32), native_quantize4(weight, 32)):
            assert not dequantize(made)[2, place].isfinite(), (bad, place)
            assert dequantize(made)[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_nan_input_makes_its_row_nan(each_isa: str, form: Form, dtype: torch.dtype) -> None:
    """And no other row of the same product."""
    packed = PackedWeight(random(40, 328), form=form)
    places = ((1, 0), (1, 5), (3, 31), (7, 150), (14, 255), (14, 300), (14, 327))
    for bad, (num_rows, place) in product(BAD, places):
        x, out = random(num_rows, 328, dtype=dtype), torch.empty(num_rows, 40)
        x[num_rows // 2, place] = bad
        linear(x, packed, out)
        is_bad = torch.arange(num_rows) == num_rows // 2
        assert torch.equal(out.isfinite(), ~is_bad[:, None].expand_as(out)), (bad, num_rows, place)


@pytest.mark.parametrize("form", FORMS)
def test_rows_can_be_kept_as_they_are(each_isa: str, form: Form) -> None:
    for dtype, num_rows in product(FLOATS, (1, 3, 20, 300)):
        packed = PackedWeight(random(70, 200), form=form)
        x, out = random(num_rows, 200, dtype=dtype), torch.empty(num_rows, 70)
        x[:, 5] *= 50
        expected = x.double() @ stands_for(packed).double().t()
        linear(x, packed, out)
        rounded = (out - expected).norm()
        packed.keep_rows()
        linear(x, packed, out)
        assert (out - expected).norm() < 3e-6 * expected.norm(), (dtype, num_rows)
        if multiplies_bytes() and form != "fp8":
            assert rounded > 10 * (out - expected).norm(), (dtype, num_rows)
