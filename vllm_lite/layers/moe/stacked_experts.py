"""The experts of a layer on a GPU, where their weights are dense: one group of kernels for all of them."""

from collections.abc import Sequence

import torch

from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe import torch_products
from vllm_lite.kernels.cuda.moe.expert_order import Stacks
from vllm_lite.kernels.cuda.moe.experts import DTYPES, UNGATED, StackedExperts
from vllm_lite.layers.moe.expert_matmul import ExpertSizes
from vllm_lite.layers.moe.stacked_weights import stack_weights
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul


def stacked_experts(
    gate_up: Sequence[Matmul], down: Sequence[Matmul], sizes: ExpertSizes, launcher: Launcher
) -> StackedExperts | None:
    """All experts by the kernels of csrc/cuda; None unless their weights are dense and of a type that these take, and
    they have a gate or the one activation of those without."""
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
    """[number, out_features]; None where this rank adds none."""
    biases = [each.bias for each in matmuls if each.bias is not None]
    return torch.stack(biases) if biases else None
