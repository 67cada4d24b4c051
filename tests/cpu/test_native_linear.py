"""The native linear layer on every instruction set, compared with float64, and the independence of its results."""

import math

import pytest
import torch

from tests.cpu.conftest import has_amx, using_isa
from tests.rows import random
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.memory import zeros
from vllm_lite.kernels.cpu.pages import HUGE_PAGE_BYTES
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear, look_up
from vllm_lite.kernels.grouped import INT4, GroupedWeight

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

# outputs, inputs, rows: whole blocks and parts of them, odd numbers of inputs, several tiles, groups and tasks
SHAPES = [
    *((1, 1, 1), (32, 2, 3), (40, 48, 12), (33, 257, 13), (300, 512, 4), (70, 1025, 97), (600, 130, 200)),
    *((100, 2050, 31), (40, 70, 600), (300, 514, 14), (130, 256, 28), (33, 1300, 32)),
]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float64."""
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("two_threads")
def test_equals_float64(each_product_isa: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for num_outputs, num_inputs, num_rows in SHAPES:
        weight = random(num_outputs, num_inputs, dtype=weight_dtype)
        x, bias = random(num_rows, num_inputs, dtype=dtype), random(num_outputs, dtype=dtype)
        for given in (bias, None):
            packed = PackedWeight(weight, given)
            out = torch.full((num_rows, num_outputs), math.nan)
            linear(x, packed, out)
            expected = exact(x, weight, given)
            # Errors of a sum grow with the sizes of its parts: float32 has 24 bits.
            size = exact(x.abs(), weight.abs(), None).max()
            assert (out - expected).abs().max() < 2e-6 * size, (each_product_isa, num_outputs, num_inputs, num_rows)


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_results_do_not_depend_on_other_rows_or_threads(each_product_isa: str, weight_dtype: torch.dtype) -> None:
    """Bit for bit, because each output is one chain of additions. After 1024 inputs the sums go through memory."""
    packed = PackedWeight(random(100, 1300, dtype=weight_dtype))
    for dtype in FLOATS:
        x = random(200, 1300, dtype=dtype)
        whole, before = torch.empty(200, 100), cpu.num_threads()
        linear(x, packed, whole)
        for num_rows in (1, 2, 3, 4, 5, 8, 11, 12, 13, 14, 15, 25, 29, 32, 33, 97, 200):
            cpu.set_num_threads(1 + num_rows % 3)
            part = torch.empty(num_rows, 100)
            linear(x[-num_rows:], packed, part)
            assert torch.equal(part, whole[-num_rows:]), (each_product_isa, dtype, num_rows)
        cpu.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", [1, 13])
@pytest.mark.usefixtures("each_product_isa")
def test_an_odd_number_of_inputs_is_filled_up_with_zeros(dtype: torch.dtype, num_rows: int) -> None:
    """Not with data that the previous call has left on the stack."""
    out = torch.empty(num_rows, 32)
    linear(torch.full((num_rows, 258), math.nan, dtype=dtype), PackedWeight(random(32, 258, dtype=dtype)), out)
    linear(random(num_rows, 257, dtype=dtype), PackedWeight(random(32, 257, dtype=dtype)), out)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [9, 20, 40])
@pytest.mark.parametrize("form", ["dense", "grouped"])
def test_rows_may_be_strided_and_outputs_are_rounded(
    each_product_isa: str, form: str, num_rows: int, dtype: torch.dtype
) -> None:
    weight = random(72, 128, dtype=dtype)
    grouped = GroupedWeight(torch.randint(16, weight.shape, dtype=torch.uint8), INT4, torch.ones(72, 1), 128)
    packed = PackedWeight(grouped if form == "grouped" else weight, random(72))
    x, wide = random(num_rows, 128, dtype=dtype), torch.empty(num_rows, 72)
    linear(x, packed, wide)
    spread = torch.full((num_rows, 200), math.nan, dtype=dtype)
    spread[:, 8:136] = x
    out = torch.full((num_rows, 100), 7.0, dtype=dtype)
    linear(spread[:, 8:136], packed, out[:, 16:88])
    assert torch.equal(out[:, 16:88], wide.to(dtype))
    assert (out[:, :16] == 7).all()
    assert (out[:, 88:] == 7).all()


@pytest.mark.skipif(not has_amx(), reason="a processor without AMX")
def test_tiles_in_plain_code_agree_with_the_processor() -> None:
    """Bit for bit, with sums and products too small for normal numbers among them."""
    outs = []
    for isa in ("amx", "amx_emulated"):
        for _ in using_isa(isa):
            x, weight = random(97, 1027, dtype=torch.bfloat16), random(70, 1027, dtype=torch.bfloat16)
            x[::3] *= 1e-20
            weight[::2] *= 1e-19
            out = torch.empty(97, 70)
            linear(x, PackedWeight(weight), out)
            outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"), [(530, 40, 1056), (70, 4131, 70), (600, 96, 40), (100, 4160, 64)]
)
@pytest.mark.usefixtures("two_threads")
def test_tiles_give_a_row_the_same_bits_among_any_others(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    """Among so many that outputs pass by the caches, with inputs in several spans, and where rows are copied."""
    x, weight = (random(size, num_inputs, dtype=torch.bfloat16) for size in (num_rows, num_outputs))
    packed = PackedWeight(weight, random(num_outputs))
    for isa in ("amx_emulated", *(["amx"] if has_amx() else [])):
        for _ in using_isa(isa):
            out, few = (torch.full((num_rows, num_outputs), math.nan, dtype=torch.bfloat16) for _ in range(2))
            linear(x, packed, out)
            for first in range(0, num_rows, 19):
                linear(x[first : first + 19], packed, few[first : first + 19])
            assert torch.equal(out, few), isa


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_a_packed_weight(dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((33, 7), (100, 64)):
        weight = random(num_outputs, num_inputs, dtype=dtype)
        packed = PackedWeight(weight)
        ids = torch.tensor([num_outputs - 1, 0, 32, 31, 0])
        out = torch.zeros(5, num_inputs + 3, dtype=dtype)
        packed.rows(ids, out[:, :num_inputs])
        assert torch.equal(out[:, :num_inputs], weight[ids])
        assert (out[:, num_inputs:] == 0).all()
        for wrong in (-1, num_outputs):
            with pytest.raises(IndexError, match=rf"\[0, {num_outputs}\), got .*{wrong}"):
                packed.rows(torch.tensor([0, wrong]), out[:2, :num_inputs])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("held", [Split(200, 0, 100), Split(200, 64, 100), Split(200, 100, 100)], ids=str)
def test_ids_of_other_ranks_give_zeros(dtype: torch.dtype, held: Split) -> None:
    weight = random(held.size, 7, dtype=dtype)
    first, last, others = held.start, held.end - 1, [i for i in (held.start - 1, held.end) if 0 <= i < 200]
    ids = torch.tensor([last, *others, first, first + 33])
    expected = torch.zeros(len(ids), 7, dtype=dtype)
    expected[[0, -2, -1]] = weight[[held.size - 1, 0, 33]]
    packed, looked = torch.full((2, len(ids), 9), 7.0, dtype=dtype)
    PackedWeight(weight).rows(ids, packed[:, :7], held)
    assert look_up(weight, ids, looked[:, :7], held)
    for out in (packed, looked):
        assert torch.equal(out[:, :7], expected)
        assert (out[:, 7:] == 7).all()
    before = looked.clone()
    for wrong in (-1, 200):
        ids[1] = wrong
        with pytest.raises(IndexError, match=rf"\[0, 200\), got {wrong}"):
            look_up(weight, ids, looked[:, :7], held)
        with pytest.raises(IndexError, match=rf"\[0, 200\), got {wrong}"):
            PackedWeight(weight).rows(ids, packed[:, :7], held)
    assert torch.equal(looked, before), "nothing is written"
    with pytest.raises(ValueError, match="a table of 100 rows cannot hold 101 of 200 ids"):
        look_up(weight, ids, looked[:, :7], Split(200, 0, 101))


def test_wrong_arguments_are_refused() -> None:
    packed, x, out = PackedWeight(random(8, 6)), random(2, 6), torch.empty(2, 8)
    with pytest.raises(ValueError, match=r"\[2, 5\] -> \[2, 8\] with 8 x 6 weights"):
        linear(x[:, :5], packed, out)
    with pytest.raises(ValueError, match=r"\[2, 6\] -> \[3, 8\]"):
        linear(x, packed, torch.empty(3, 8))
    with pytest.raises(ValueError, match=r"float32 -> torch\.bfloat16"):
        linear(x, packed, out.bfloat16())
    with pytest.raises(ValueError, match="contiguous"):
        linear(random(6, 2).t(), packed, out)
    with pytest.raises(ValueError, match="a matrix on the CPU"):
        PackedWeight(random(8))
    with pytest.raises(ValueError, match="8 elements, got"):
        PackedWeight(random(8, 6), random(7))
    with pytest.raises(ValueError, match=r"rows of torch\.float32 cannot be copied into torch\.bfloat16"):
        packed.rows(torch.tensor([1]), x[:1].bfloat16())
    linear(x[:0], packed, out[:0])


@pytest.mark.parametrize("num_bytes", [100, HUGE_PAGE_BYTES - 64, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 100])
def test_memory_is_aligned_and_zero(num_bytes: int) -> None:
    memory = zeros(num_bytes // 2, torch.bfloat16)
    assert memory.shape == (num_bytes // 2,)
    assert memory.data_ptr() % (64 if num_bytes < HUGE_PAGE_BYTES else HUGE_PAGE_BYTES) == 0
    assert not memory.any()
    memory.fill_(1)
