"""Experts as a GPU has them: their weights in one tensor each, and kernels that are held to the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.mixtures import VARIANTS
from tests.kernels import emulator
from tests.rows import random
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cuda.moe.experts import StackedExperts
from vllm_lite.kernels.routing import Chosen
from vllm_lite.layers.moe import experts as experts_module
from vllm_lite.layers.moe.expert_matmul import ExpertSizes, LoopedExperts
from vllm_lite.layers.moe.experts import SparseMLP, make_expert_matmul
from vllm_lite.layers.moe.stacked_experts import StackMemory, stack_weights, stacked_experts
from vllm_lite.layers.weights.matmul import DenseMatmul, Int8Matmul, Matmul
from vllm_lite.layers.weights.weight_form import DenseForm, WidenedForm
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

HIDDEN, INNER = 48, 20


@pytest.fixture(scope="module")
def launcher() -> emulator.EmulatorLauncher:
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    return emulator.EmulatorLauncher()


def sparse_layers(path: Path, quantization: Quantization | None = None) -> tuple[Any, list[SparseMLP]]:
    """A model on the meta device, whose tensors can still have views, and its experts."""
    model: Any = build(load_spec(path), "bfloat16", "meta", Sizes(8, 8), quantization=quantization)
    sparse = [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP)]
    assert sparse
    return model, sparse


def make(num_experts: int, dtype: torch.dtype = torch.float32) -> tuple[list[DenseMatmul], list[DenseMatmul]]:
    """Different gate_up and down matrices for each expert, each in separate memory."""
    both = random(num_experts, 2 * INNER, HIDDEN, dtype=dtype).mul_(HIDDEN**-0.5)
    down = random(num_experts, HIDDEN, INNER, dtype=dtype).mul_(INNER**-0.5)
    return [DenseMatmul(w.clone(), None) for w in both], [DenseMatmul(w.clone(), None) for w in down]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
@pytest.mark.parametrize("held", [Split.whole(5), Split(5, 0, 2), Split(5, 2, 3)])
def test_the_kernels_are_held_to_the_loop(
    dtype: torch.dtype,
    tolerance: float,
    held: Split,
    launcher: emulator.EmulatorLauncher,
) -> None:
    """Includes an expert without rows, and one with all."""
    part, sizes = slice(held.start, held.end), ExpertSizes(held, INNER, "silu")
    gate_up, down = (each[part] for each in make(5, dtype))
    x, scores = random(11, HIDDEN, dtype=dtype), torch.rand(11, 5, generator=torch.Generator().manual_seed(1))
    scores[:, 3], scores[:, 1] = -1, 2
    chosen = Chosen(scores.argsort(1, descending=True)[:, :3].int().contiguous(), random(11, 3).abs())
    theirs, ours = torch.empty_like(x), torch.full_like(x, torch.nan)
    LoopedExperts(gate_up, down, sizes).forward(x, chosen, theirs)
    experts = stacked_experts(gate_up, down, sizes, launcher)
    assert experts is not None
    experts.forward(x, chosen, ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


def test_other_weights_are_left_to_the_loop(launcher: emulator.EmulatorLauncher) -> None:
    sizes = ExpertSizes(Split.whole(2), INNER, "silu")
    gate_up, down = make(2)
    int8: list[Matmul] = [down[0], Int8Matmul(down[1].weight, None)]
    biased = [gate_up[0], DenseMatmul(gate_up[1].weight, torch.zeros(2 * INNER))]
    assert stacked_experts(gate_up, int8, sizes, launcher) is None
    assert stacked_experts(biased, down, sizes, launcher) is None
    assert stacked_experts(*make(2, torch.float64), sizes, launcher) is None


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_gpu_has_its_kernels_or_the_loop(
    has_kernels: bool, launcher: emulator.EmulatorLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_module, "default_launcher", lambda: launcher if has_kernels else None)
    sizes = ExpertSizes(Split.whole(2), INNER, "silu")
    gate_up, down = ([DenseMatmul(each.weight.as_subclass(OnGpu), None) for each in part] for part in make(2))
    made = make_expert_matmul(gate_up, down, sizes)
    assert isinstance(made, StackedExperts if has_kernels else LoopedExperts)


def test_adjacent_weights_are_used_without_a_copy() -> None:
    memory = random(7, HIDDEN, INNER)
    whole = stack_weights([DenseMatmul(part, None) for part in memory[2:5]])
    assert whole.data_ptr() == memory[2].data_ptr()
    assert torch.equal(whole, memory[2:5])


@pytest.mark.parametrize("order", [[1, 0], [0, 2], [0, 0]])
def test_other_weights_are_copied_once(order: list[int]) -> None:
    """Each is a view of the copy then, so that there is none beside it."""
    memory = random(3, HIDDEN, INNER)
    matmuls = [DenseMatmul(memory[index], None) for index in order]
    whole = stack_weights(matmuls)
    assert torch.equal(whole, memory[order])
    assert [each.weight.data_ptr() for each in matmuls] == [part.data_ptr() for part in whole]


def test_weights_of_two_allocations_are_not_adjacent() -> None:
    """Although the second weight is at the offset in its memory that would follow the first one."""
    one, other = random(2, 3, 4), torch.zeros(2, 3, 4)
    assert torch.equal(
        stack_weights([DenseMatmul(one[0], None), DenseMatmul(other[1], None)]), torch.stack((one[0], other[1]))
    )


def test_experts_of_several_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \[\(2, 3\), \(4, 3\)\]"):
        stack_weights([DenseMatmul(torch.zeros(2, 3), None), DenseMatmul(torch.zeros(4, 3), None)])


def made(name: str, folder: Path) -> Path:
    return next(variant for variant in VARIANTS if variant.name == name).make(folder)


@pytest.mark.parametrize("name", ["qwen3-moe", "granite-moe"])
def test_weights_are_loaded_to_where_the_kernels_read_them(name: str, tmp_path: Path) -> None:
    """Both from separate tensors and from one tensor with all experts."""
    path = made(name, tmp_path / "made")
    model, sparse = sparse_layers(path)
    load_weights(model, path)
    for experts in (mlp.experts for mlp in sparse):
        assert experts.memories is not None
        for linears, memory in zip((experts.gate_up, experts.down), experts.memories, strict=True):
            assert isinstance(memory, StackMemory)
            weights = [linear.matmul.weight for linear in linears if isinstance(linear.matmul, DenseMatmul)]
            assert all(weight._base is memory.whole for weight in weights)
            size = memory.whole[0].numel()
            assert [weight.storage_offset() for weight in weights] == [size * i for i in range(len(linears))]


def test_experts_that_become_int8_allocate_no_floats(tmp_path: Path) -> None:
    _, sparse = sparse_layers(made("qwen3-moe", tmp_path / "made"), "int8")
    assert all(mlp.experts.memories is None for mlp in sparse)


@pytest.mark.parametrize(("device", "become"), [("meta", WidenedForm), ("cpu", DenseForm)])
def test_experts_that_are_quantized_become_dense_where_kernels_take_no_others(
    device: str, become: type, tmp_path: Path
) -> None:
    model: Any = build(load_spec(made("qwen3-moe", tmp_path / "made")), "bfloat16", device, Sizes(8, 8))
    sparse = [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP)]
    forms = {type(linear.form) for mlp in sparse for linear in (*mlp.experts.gate_up, *mlp.experts.down)}
    assert forms == {become}
    assert {type(mlp.router.linear.form) for mlp in sparse} == {DenseForm}
