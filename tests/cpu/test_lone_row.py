"""One row times grouped weights, whose kernels know the layout of cells: it has the bits that it has among others."""

import itertools
from functools import partial

import pytest
import torch

from tests.cpu.test_gguf_blocks import blocks
from tests.cpu.test_native_grouped import check_packed, grouped, uneven_rows
from tests.rows import random
from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.kernels.gguf_blocks import BlockRows
from vllm_lite.kernels.grouped import INT4, INT5, INT8, UINT4, UINT5

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

SIZES = [(70, 576), (33, 200), (64, 1536), (32, 1)]
"""Outputs and inputs: whole blocks and parts of them, parts of groups, and of 256 inputs."""


def check_alone(weight: PackedWeight, x: torch.Tensor, label: object) -> None:
    together, alone, in_program = torch.full((3, len(x), weight.num_outputs), 7.0, dtype=x.dtype)
    linear(x, weight, together)
    program = Program()  # L3 holds its weights, which a product outside of a program does not expect
    for row in range(len(x)):
        linear(x[row : row + 1], weight, alone[row : row + 1])
        program.record(partial(linear, x[row : row + 1], weight, in_program[row : row + 1]))
    for _ in range(2):
        program.replay()
    assert together[:-1].isfinite().all()
    for name, found in (("alone", alone), ("in a program", in_program)):
        assert torch.equal(together.nan_to_num(nan=7), found.nan_to_num(nan=7)), (label, name)


@pytest.mark.parametrize("form", ["int4", "int4_g32", "int5_g32", "int8"])
@pytest.mark.usefixtures("two_threads")
def test_weights_quantized_when_they_are_loaded(each_isa: str, form: Form) -> None:
    for num_outputs, num_inputs in SIZES:
        packed = PackedWeight(random(num_outputs, num_inputs), random(num_outputs), form=form)
        check_alone(packed, rows_of(num_inputs), (each_isa, num_outputs, num_inputs))


@pytest.mark.parametrize("values", [INT4, UINT4, INT5, UINT5, INT8], ids=["int4", "uint4", "int5", "uint5", "int8"])
@pytest.mark.usefixtures("two_threads")
def test_scales_of_16_bits(each_isa: str, values: torch.Tensor) -> None:
    for (num_outputs, num_inputs), minima in itertools.product(SIZES, (False, True)):
        weight = grouped(num_outputs, num_inputs, 32, values, minima=minima, scales=torch.float16)
        if weight.minima is not None:
            weight = weight._replace(minima=weight.minima.half().float())
        packed, x = PackedWeight(weight), rows_of(num_inputs)
        check_alone(packed, x, (each_isa, num_outputs, num_inputs, minima))
        for row in range(len(x) - 1):
            check_packed(packed, weight, x[row : row + 1].float(), None, (each_isa, minima, row))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.usefixtures("two_threads")
def test_blocks_of_files(each_isa: str, kind: str) -> None:
    for num_outputs, num_blocks in ((70, 3), (32, 1)):
        rows = BlockRows(kind, blocks(kind, num_outputs, num_blocks))
        packed = PackedWeight(rows)
        check_alone(packed, rows_of(packed.num_inputs), (each_isa, kind, num_outputs))


def rows_of(num_inputs: int) -> torch.Tensor:
    """Rows of which 8 bits are too few in some groups or in all; the last one has no numbers."""
    x = uneven_rows(9, 600)[:, :num_inputs] if num_inputs < 600 else random(9, num_inputs).pow(3).bfloat16()
    x[-1, 0] = torch.nan
    return x


@pytest.mark.parametrize("form", [None, "int4_g32", "int5_g32", "int8"])
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_the_weights_that_are_prefetched(each_isa: str, form: Form | None) -> None:
    """In a program threads prefetch their parts of the next product's weights, which may begin within a block."""
    first, second = (PackedWeight(random(*size).bfloat16(), form=form) for size in ((4100, 300), (100, 4100)))
    x = random(1, 300).bfloat16()
    inner, out, alone = (torch.empty(1, size, dtype=torch.bfloat16) for size in (4100, 100, 100))
    program = Program()
    program.record(partial(linear, x, first, inner))
    program.record(partial(linear, inner, second, out))
    for _ in range(2):
        program.replay()
    cpu.set_num_threads(1)
    linear(x, first, inner)
    linear(inner, second, alone)
    assert torch.equal(out, alone), each_isa
