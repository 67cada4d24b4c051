"""The native kernel of adapters, held against matrix products in float64; and the plain one, against the native."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.kernels.cpu.weights.lora import Lengths, LoraSlots
from vllm_lite.layers.weights.adapter_rows import AdapterMask, Grouped, GroupedRows
from vllm_lite.layers.weights.lora import AdapterLimits, StackedSlots
from vllm_lite.layers.weights.weight_form import LinearShape

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

CPU = torch.device("cpu")
LAYERS = {
    "one": (64, [72], [0]),
    "odd": (37, [33], [0]),
    "three matrices": (100, [96, 32, 40], [0, 1, 2]),
    "three of one": (64, [48, 16, 16], [0, 0, 0]),
}
"""Inputs, outputs of each projection, and index of each projection's matrix A."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


Adapter = tuple[list[torch.Tensor | None], list[torch.Tensor | None], Lengths | None]


def adapter(layer: str, ranks: list[int], dtype: torch.dtype, *, has_lengths: bool = False) -> Adapter:
    """A, B and lengths of a layer; rank 0: nothing."""
    num_inputs, sizes, matrix = LAYERS[layer]
    down = [random(rank, num_inputs, dtype=dtype) if rank else None for rank in ranks]
    pairs = zip(sizes, matrix, strict=True)
    up = [random(size, ranks[number], dtype=dtype) if ranks[number] else None for size, number in pairs]
    adapted = torch.cat([torch.full((size,), float(each is not None)) for size, each in zip(sizes, up, strict=True)])
    lengths = Lengths(1 + adapted * torch.rand(len(adapted)), adapted * torch.randn(len(adapted)))
    return down, up, lengths if has_lengths else None


def exact(layer: str, adapters: list[Any], slots: np.ndarray, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    _, sizes, matrix = LAYERS[layer]
    result = out.double().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        down, up, lengths = adapters[slot]
        first = 0
        for size, number, part in zip(sizes, matrix, up, strict=True):
            if part is not None:
                result[row, first : first + size] += part.double() @ (down[number].double() @ x[row].double())
            first += size
        if lengths is not None:
            result[row] = result[row] * lengths.gain.double() + lengths.shift.double()
    return result


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_kernel_adds_the_product_of_each_rows_adapter(each_vector_isa: str, layer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_inputs, sizes, matrix = LAYERS[layer]
    count = max(matrix) + 1
    kinds = ([5, 3, 8], False), ([16, 0, 4], True), ([1, 9, 0], True)
    made = [adapter(layer, ranks[:count], dtype, has_lengths=own) for ranks, own in kinds]
    native = LoraSlots(4, num_inputs, sizes, matrix)
    for slot, each in enumerate(made):
        native.put(slot, native.pack(*each))
    rows = Grouped.empty(4, 300)
    before = cpu.num_threads()
    for num_rows, num_threads in ((1, 1), (2, 2), (7, 1), (40, 3), (300, 2)):
        slots = np.random.default_rng(num_rows).integers(-1, 3, num_rows)
        rows.fill(slots)
        cpu.set_num_threads(num_threads)
        x, start = random(num_rows, num_inputs, dtype=dtype), random(num_rows, sum(sizes), dtype=dtype)
        for out_dtype in {dtype, torch.float32}:
            out = start.to(out_dtype, copy=True)
            native.add(x, rows.rows, rows.starts, out)
            expected = exact(layer, made, slots, x, start)
            size = expected.abs().max()
            error = 1e-6 if out_dtype == torch.float32 else torch.finfo(out_dtype).eps
            assert (out.double() - expected).abs().max() <= error * size, (each_vector_isa, num_rows, out_dtype)
            unadapted = torch.from_numpy(slots < 0)
            assert torch.equal(out[unadapted], start.to(out_dtype)[unadapted])
    cpu.set_num_threads(before)


def test_a_row_does_not_depend_on_those_beside_it(each_vector_isa: str) -> None:
    """Bit for bit: nor on the number of threads."""
    layer = "three matrices"
    num_inputs, sizes, matrix = LAYERS[layer]
    native = LoraSlots(2, num_inputs, sizes, matrix)
    for slot in range(2):
        native.put(slot, native.pack(*adapter(layer, [16, 16, 7], torch.bfloat16)))
    x, whole = random(200, num_inputs, dtype=torch.bfloat16), torch.zeros(200, sum(sizes), dtype=torch.bfloat16)
    slots, rows = np.arange(200) % 2, Grouped.empty(2, 200)
    rows.fill(slots)
    native.add(x, rows.rows, rows.starts, whole)
    before = cpu.num_threads()
    for num_rows in (1, 2, 3, 5, 8, 33, 200):
        cpu.set_num_threads(1 + num_rows % 3)
        part = torch.zeros(num_rows, sum(sizes), dtype=torch.bfloat16)
        rows.fill(slots[-num_rows:])
        native.add(x[-num_rows:], rows.rows, rows.starts, part)
        assert torch.equal(part, whole[-num_rows:]), (each_vector_isa, num_rows)
    cpu.set_num_threads(before)


def test_a_recorded_call_sees_the_adapters_of_each_step() -> None:
    layer = "three of one"
    num_inputs, sizes, matrix = LAYERS[layer]
    native, rows = LoraSlots(2, num_inputs, sizes, matrix), Grouped.empty(2, 4)
    x, out, program = random(4, num_inputs), torch.zeros(4, sum(sizes)), Program()
    program.record(lambda: native.add(x, rows.rows, rows.starts, out))
    program.replay()
    assert not out.any()
    made = adapter(layer, [4], torch.float32), adapter(layer, [8], torch.float32, has_lengths=True)
    for slot, each in enumerate(made):
        native.put(slot, native.pack(*each))
    for slots in ([0, 1, -1, 0], [-1, -1, 1, -1]):
        rows.fill(np.array(slots))
        out.zero_()
        program.replay()
        assert (out - exact(layer, list(made), np.array(slots), x, torch.zeros_like(out))).abs().max() < 1e-4
    native.put(1, None)
    out.zero_()
    program.replay()
    assert not out.any()


@pytest.mark.parametrize("layer", LAYERS)
def test_plain_torch_adds_the_same(layer: str) -> None:
    """For devices without the kernel: products over all slots, and a mask."""
    num_inputs, sizes, matrix = LAYERS[layer]
    count = max(matrix) + 1
    shape = LinearShape(Split.whole(num_inputs), tuple(map(Split.whole, sizes)), torch.float32, CPU)
    masked = AdapterMask(3, 20, torch.float32, CPU)
    native, plain = LoraSlots(3, num_inputs, sizes, matrix), StackedSlots(AdapterLimits(3, 8), shape, matrix, masked)
    for slot, ranks in enumerate(([5, 3, 8], [8, 0, 4])):
        own = adapter(layer, ranks[:count], torch.float32, has_lengths=slot == 1)
        native.put(slot, native.pack(*own))
        plain.put(slot, plain.pack(*own))
    grouped, slots = GroupedRows(3, 20), np.array([0, 1, -1, 1, 0, -1, 0])
    x, start = random(7, num_inputs), random(7, sum(sizes))
    for wanted in (None, torch.tensor([3, 2, 6])):
        for rows in (grouped, masked):
            rows.begin_step(slots)
            if wanted is not None:
                rows.gather(wanted)
        given = start if wanted is None else start[wanted]
        own_x = x if wanted is None else x[wanted]
        outs = given.clone(), given.clone()
        native.add(own_x, *grouped.current, outs[0])
        plain.add(own_x, outs[1])
        assert not torch.equal(outs[0], given)
        assert (outs[0] - outs[1]).abs().max() < 1e-4
    masked.begin_step(np.full(7, -1))
    plain.add(x, out := start.clone())
    assert masked.is_idle
    assert torch.equal(out, start)
