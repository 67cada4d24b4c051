"""The experts of a layer on a GPU with dense weights: grouped kernels compute all of them at once."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch

from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe import torch_products
from vllm_lite.kernels.cuda.moe.experts import DTYPES, UNGATED, StackedExperts, Stacks
from vllm_lite.layers.moe.expert_matmul import ExpertSizes
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul
from vllm_lite.layers.weights.weight_slot import WeightGroup


def stacked_experts(
    gate_up: Sequence[Matmul], down: Sequence[Matmul], sizes: ExpertSizes, launcher: Launcher
) -> StackedExperts | None:
    """Make the products of all experts by the kernels of csrc/cuda; None if weights are not dense, or the kernels do
    not take their type, or without a gate their activation."""
    dense = [[each for each in part if isinstance(each, DenseMatmul)] for part in (gate_up, down)]
    if any(len({each.bias is None for each in part}) > 1 for part in dense):
        return None
    if sizes.gated == (sizes.activation == UNGATED):
        return None
    if not gate_up or any(len(part) < len(gate_up) for part in dense) or dense[0][0].weight.dtype not in DTYPES:
        return None
    stacks = Stacks(*map(stack_weights, dense), *map(_stack_biases, dense))
    for_many = torch_products.for_weights(launcher, stacks)
    return StackedExperts(launcher, stacks, sizes.held.start, sizes.activation, for_many)


def _stack_biases(matmuls: Sequence[DenseMatmul]) -> torch.Tensor | None:
    """Biases as [num_experts, out_features]; None if this rank adds none."""
    biases = [each.bias for each in matmuls if each.bias is not None]
    return torch.stack(biases) if biases else None


# ---- Dense weights of a layer's experts in one tensor, for a GPU's kernels, without a second copy


class StackMemory:
    """One tensor for the weights of all experts, allocated when the first is loaded."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device

    @cached_property
    def whole(self) -> torch.Tensor:
        """[num_experts, out_features, in_features]"""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def place(self, group: WeightGroup, index: int) -> WeightGroup:
        """Change `group`, whose first tensor is a dense weight, to load that into the stack at `index`."""
        stack, *others = group.stacks
        return group._replace(stacks=(stack._replace(memory=partial(self._part, index)), *others))

    def _part(self, index: int) -> torch.Tensor:
        return self.whole[index]


def stack_weights(matmuls: Sequence[DenseMatmul]) -> torch.Tensor:
    """Return the weights as one tensor [num_experts, out_features, in_features]; each becomes a view of it.

    Weights that are contiguous in memory, as StackMemory loads them, are not moved. Others are copied, and their old
    memory is freed. Raises ValueError if their shapes differ.
    """
    weights = [each.weight for each in matmuls]
    first = weights[0]
    if any(each.shape != first.shape for each in weights):
        raise ValueError(f"experts must have one shape, got {sorted({tuple(each.shape) for each in weights})}")
    memory = first.untyped_storage().data_ptr()
    are_adjacent = [
        each.is_contiguous()
        and each.untyped_storage().data_ptr() == memory
        and each.storage_offset() == first.storage_offset() + index * first.numel()
        for index, each in enumerate(weights)
    ]
    if all(are_adjacent):
        return first.as_strided((len(weights), *first.shape), (first.numel(), first.shape[1], 1))
    whole = first.new_empty(len(weights), *first.shape)
    del weights, first
    for part, matmul in zip(whole, matmuls, strict=True):
        matmul.weight = part.copy_(matmul.weight)
    return whole
