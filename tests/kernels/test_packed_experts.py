"""A layer's packed experts on CUDA through the emulator, and the errors of their Python side."""

import pytest
import torch

from tests.kernels import packed_experts_cases as cases
from tests.kernels.cases import Recorder
from tests.kernels.emulator import EmulatorLauncher, check_orders
from tests.kernels.experts_cases import Sizes, pick
from tests.kernels.fused_cases import draw
from vllm_lite.kernels.cuda.moe.packed_experts import GpuPackedExperts, PackedStacks
from vllm_lite.kernels.cuda.moe.packed_stack import alike, stackable, tiles_in_order, tiles_in_turn
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.grouped import E2M1, INT4, INT8, GroupedWeight
from vllm_lite.kernels.routing import Chosen

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.usefixtures("emulated")
def test_the_order_of_threads_does_not_show() -> None:
    own, chosen = cases.layer(CPU, BF16, E2M1, 32, biases=True), pick(9, cases.SIZES, CPU)
    x = draw((9, cases.SIZES.hidden), BF16, CPU)

    def computed(launcher: EmulatorLauncher) -> torch.Tensor:
        own.experts(launcher).forward(x, chosen, out := torch.empty_like(x))
        return out

    check_orders(computed)


def test_few_pairs_have_no_more_blocks_than_there_are_pairs(emulated: EmulatorLauncher) -> None:
    """And no launch depends on the chosen experts, as a CUDA graph requires."""
    sizes = Sizes(num_experts=40, top=2, hidden=64, inner=32, held=40)
    own, recorders = cases.layer(CPU, BF16, INT4, 32, sizes=sizes), (Recorder(emulated), Recorder(emulated))
    x, top = draw((3, 64), BF16, CPU), torch.ones(3, 2)
    two = torch.tensor([[0, 39]] * 3, dtype=torch.int32)
    for recorder, experts in zip(recorders, (pick(3, sizes, CPU).experts, two), strict=True):
        own.experts(recorder).forward(x, Chosen(experts, top), torch.empty_like(x))
    launches = recorders[0].launches
    assert launches == recorders[1].launches
    assert [launch.name for launch in launches] == ["sort_pairs", "packed_experts", "packed_experts", "sum_experts"]
    assert [launch.grid for launch in launches[1:3]] == [(2, 6, 1), (4, 6, 1)]


def test_tiles_in_turn_and_back() -> None:
    rows = torch.arange(10)
    turned = tiles_in_turn(rows, 0, 96, 1)
    assert turned.tolist() == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9], "six tiles of outputs, four that fill up"
    assert torch.equal(tiles_in_order(turned, 96), rows)


def test_weights_that_can_be_a_stack() -> None:
    def made(outputs: int, inputs: int, values: torch.Tensor = INT4, group_size: int = 32) -> GpuPackedWeight:
        codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
        return GpuPackedWeight.of(
            GroupedWeight(codes, values, torch.ones(outputs, -(-inputs // group_size)), group_size), CPU
        )

    assert stackable(made(64, 40), in_turn=True)
    assert stackable(made(48, 40), in_turn=False)
    assert not stackable(made(48, 40), in_turn=True), "halves that are not whole tiles"
    assert not stackable(made(64, 36), in_turn=True), "inputs that are not loaded by 16 bytes"
    assert not stackable(made(64, 40)._replace(order=torch.arange(40)), in_turn=True)
    assert alike(made(64, 40), made(64, 40))
    for other in (made(64, 48), made(32, 40), made(64, 40, INT8), made(64, 40, group_size=64)):
        assert not alike(made(64, 40), other)


def test_other_weights_are_refused(emulated: EmulatorLauncher) -> None:
    own = cases.layer(CPU, BF16, INT4, 32)
    gate_up, down = own.stacks[:2]
    with pytest.raises(ValueError, match=r"\[104, 80\] and \[104, 80\] are not MLPs with a gate"):
        GpuPackedExperts(emulated, PackedStacks(down, down), 0, "silu", BF16)
    with pytest.raises(ValueError, match=r"\[160, 104\] and \[104, 80\] are not MLPs without a gate"):
        GpuPackedExperts(emulated, PackedStacks(gate_up, down), 0, "relu2", BF16)
    with pytest.raises(ValueError, match="tiles of gate and up must lie in turn"):
        GpuPackedExperts(emulated, PackedStacks(gate_up._replace(in_turn=False), down), 0, "silu", BF16)
    with pytest.raises(ValueError, match=r"rows must be float16 or bfloat16, not torch\.float32"):
        GpuPackedExperts(emulated, PackedStacks(gate_up, down), 0, "silu", torch.float32)
    with pytest.raises(ValueError, match=r"biases of down must be torch\.bfloat16 \[5, 104\], contiguous"):
        GpuPackedExperts(emulated, PackedStacks(gate_up, down, down_bias=torch.zeros(5, 104)), 0, "silu", BF16)
