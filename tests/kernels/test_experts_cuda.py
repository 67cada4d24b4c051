"""A layer's experts on CUDA through the emulator, and the errors of their Python side."""

import pytest
import torch

from tests.kernels import experts_cases as cases
from tests.kernels.cases import Recorder
from tests.kernels.emulator import EmulatorLauncher, check_orders
from tests.kernels.fused_cases import draw
from vllm_lite.kernels.cuda.moe.experts import StackedExperts, Stacks
from vllm_lite.kernels.cuda.moe.torch_products import for_weights
from vllm_lite.kernels.routing import Chosen

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
def test_the_order_of_threads_does_not_show() -> None:
    sizes = cases.Sizes(first=1, held=3)
    stacks, chosen = cases.weights(sizes, torch.bfloat16, CPU), cases.pick(40, sizes, CPU)
    x = draw((40, sizes.hidden), torch.bfloat16, CPU)

    def computed(launcher: EmulatorLauncher) -> torch.Tensor:
        StackedExperts(launcher, stacks, 1, "silu").forward(x, chosen, out := torch.empty_like(x))
        return out

    check_orders(computed)


def test_no_launch_depends_on_the_chosen_experts(emulated: EmulatorLauncher) -> None:
    """A CUDA graph requires that, because it repeats the launches of the capture."""
    sizes = cases.Sizes()
    stacks, x = cases.weights(sizes, torch.bfloat16, CPU), draw((9, sizes.hidden), torch.bfloat16, CPU)
    recorders = Recorder(emulated), Recorder(emulated)
    all_to_one = Chosen(torch.full((9, 3), 4, dtype=torch.int32), torch.ones(9, 3))
    for recorder, chosen in zip(recorders, (cases.pick(9, sizes, CPU), all_to_one), strict=True):
        StackedExperts(recorder, stacks, 0, "silu").forward(x, chosen, torch.empty_like(x))
    assert len(recorders[0].launches) == 4
    assert recorders[0].launches == recorders[1].launches


def test_other_tensors_are_refused(emulated: EmulatorLauncher) -> None:
    sizes = cases.Sizes()
    stacks, chosen = cases.weights(sizes, torch.bfloat16, CPU), cases.pick(2, sizes, CPU)
    experts, x = StackedExperts(emulated, stacks, 0, "silu"), torch.zeros(2, sizes.hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x must be torch\.bfloat16 \[2, 80\] .*float32"):
        experts.forward(x.float(), chosen, x)
    with pytest.raises(ValueError, match="out must be"):
        experts.forward(x, chosen, x[:1])
    with pytest.raises(ValueError, match=r"ids must be .*\[2, 3\]"):
        experts.forward(x, Chosen(chosen.experts[:1], chosen.weights), x)
    with pytest.raises(ValueError, match="weights must be"):
        experts.forward(x, Chosen(chosen.experts, chosen.weights.half()), x)


def test_other_weights_are_refused(emulated: EmulatorLauncher) -> None:
    gate_up, down = cases.weights(cases.Sizes(), torch.bfloat16, CPU)[:2]
    with pytest.raises(ValueError, match=r"\[5, 80, 40\] and \[5, 80, 40\] are not MLPs with a gate"):
        StackedExperts(emulated, Stacks(down, down), 0, "silu")
    with pytest.raises(ValueError, match=r"of one type, got torch\.bfloat16 and torch\.float16"):
        StackedExperts(emulated, Stacks(gate_up, down.half()), 0, "silu")
    with pytest.raises(ValueError, match=r"of one type, got torch\.float64"):
        StackedExperts(emulated, Stacks(gate_up.double(), down.double()), 0, "silu")
    with pytest.raises(ValueError, match=r"biases of down must be torch\.bfloat16 \[5, 80\], contiguous"):
        StackedExperts(emulated, Stacks(gate_up, down, down_bias=down[:, :, 0]), 0, "silu")


def test_products_of_torch_are_for_large_gpus_only(emulated: EmulatorLauncher) -> None:
    assert for_weights(emulated, cases.weights(cases.Sizes(), torch.bfloat16, CPU)) is None
