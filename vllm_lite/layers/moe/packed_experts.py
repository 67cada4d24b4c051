"""The experts of a layer on a GPU with packed weights: each expert's codes are loaded into one tensor.

Each expert's codes are copied into the layer's tensor as soon as it is packed, so that a model never holds all codes
twice. If no kernel takes a layer's experts, all of them become dense.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from vllm_lite.kernels.cuda.moe.experts import UNGATED
from vllm_lite.kernels.cuda.moe.packed_experts import GpuPackedExperts, PackedStacks
from vllm_lite.kernels.cuda.moe.packed_stack import PackedStack, alike, stackable, tiles_in_order, tiles_in_turn
from vllm_lite.kernels.cuda.weights.many_rows import WidenedProducts
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.layers.moe.expert_matmul import ExpertSizes
from vllm_lite.layers.weights import gpu_matmul
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.matmul import DenseMatmul, say_dense
from vllm_lite.layers.weights.weight_slot import WeightGroup


class _Part(NamedTuple):
    """The weight of one expert: in the stack, or separate."""

    weight: GpuPackedWeight
    bias: torch.Tensor | None


class PackedMemory:
    """One matrix of all experts of a layer; packed weights of equal form share one tensor of codes."""

    def __init__(self, linears: Sequence[Linear], *, in_turn: bool) -> None:
        """in_turn: whether tiles of the two halves of the outputs alternate."""
        self._linears, self._in_turn = linears, in_turn
        self._codes: torch.Tensor | None = None
        self._parts: dict[int, _Part] = {}

    def place(self, group: WeightGroup, index: int) -> WeightGroup:
        """Change `group` to load its weight into the stack at `index`."""
        return group._replace(take=partial(self._take, index))

    def _take(self, index: int, *tensors: torch.Tensor) -> None:
        linear = self._linears[index]
        linear.load(*tensors)
        matmul = linear.matmul
        if not isinstance(matmul, PackedLinear) or not stackable(matmul.weight, in_turn=self._in_turn):
            return
        weight, first = matmul.weight, next(iter(self._parts.values()), None)
        if first is not None and not alike(first.weight, weight):
            return
        if self._codes is None:
            self._codes = weight.codes.new_empty(len(self._linears), *weight.codes.shape)
        placed = self._codes[index]
        placed.copy_(tiles_in_turn(weight.codes, 0, weight.shape[0], 1) if self._in_turn else weight.codes)
        self._parts[index] = _Part(weight._replace(codes=placed), matmul.bias)
        del linear.matmul  # its weight is a part of the stack now

    def is_whole(self) -> bool:
        """Whether all experts are in the stack."""
        return len(self._parts) == len(self._linears) > 0

    def stack(self) -> tuple[PackedStack, torch.Tensor | None]:
        """Hand over the stack of all experts and their biases, float32 [experts, outputs], to the caller. Only if
        `is_whole`."""
        parts = [self._parts[index] for index in range(len(self._linears))]
        assert self._codes is not None  # noqa: S101 (for the types: the stack is whole)
        stack = PackedStack.of(self._codes, [part.weight for part in parts], in_turn=self._in_turn)
        biases = [part.bias for part in parts if part.bias is not None]
        self._codes, self._parts = None, {}
        return stack, torch.stack(biases) if biases else None

    def give_back(self) -> None:
        """Replace packed weights by dense ones in all Linears, as no kernel multiplies a partly packed layer."""
        for index, linear in enumerate(self._linears):
            if index in self._parts:
                weight, bias = self._parts.pop(index)
                codes = tiles_in_order(weight.codes, weight.shape[0]) if self._in_turn else weight.codes
                linear.matmul = _dense(linear, weight._replace(codes=codes), bias)
            elif isinstance(linear.matmul, PackedLinear):
                linear.matmul = _dense(linear, linear.matmul.weight, linear.matmul.bias)
        self._codes = None


def packed_experts(
    gate_up: PackedMemory, down: PackedMemory, sizes: ExpertSizes, linear: Linear
) -> GpuPackedExperts | None:
    """Make the products of all experts by the kernels of csrc/cuda. None if they are not all packed in equal form, or
    without a gate have an activation that the kernels lack; their Linears are then dense. `linear`: one of them."""
    whole = gate_up.is_whole() and down.is_whole() and sizes.gated != (sizes.activation == UNGATED)
    dtype, device = linear.shape.dtype, linear.shape.device
    launcher = gpu_matmul.launcher_for(dtype, device)
    if not whole or launcher is None:
        gate_up.give_back()
        down.give_back()
        return None
    (first, first_bias), (second, second_bias) = gate_up.stack(), down.stack()
    biases = (None if bias is None else bias.to(dtype) for bias in (first_bias, second_bias))
    stacks = PackedStacks(first, second, *biases)
    return GpuPackedExperts(launcher, stacks, sizes.held.start, sizes.activation, dtype)


def _dense(linear: Linear, weight: GpuPackedWeight, bias: torch.Tensor | None) -> DenseMatmul:
    dtype, device = linear.shape.dtype, linear.shape.device
    say_dense("some packed experts of a layer", device.type, str(dtype).removeprefix("torch."))
    launcher = gpu_matmul.launcher_for(dtype, device)
    assert launcher is not None  # noqa: S101 (for the types: it has packed the weight)
    numbers = WidenedProducts(launcher, weight).widened(0, weight.shape[0], dtype).contiguous()
    if weight.order is not None:
        numbers = torch.empty_like(numbers).index_copy_(1, weight.order, numbers)
    return DenseMatmul(numbers, None if bias is None else bias.to(dtype))
