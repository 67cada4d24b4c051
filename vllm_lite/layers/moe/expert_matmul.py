"""Matrix products of a layer's experts: the interface of fused operations, and a loop over experts as reference."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cpu.experts import PackedExperts
from vllm_lite.kernels.routing import Chosen
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.weights.matmul import Matmul, NativeMatmul


class ExpertSizes(NamedTuple):
    """Sizes that all experts of a rank share."""

    held: Split
    """The rank's experts of the layer."""
    inner: int
    """Intermediate size of an expert."""
    activation: Activation
    gated: bool = True


class ExpertMatmul(Protocol):
    """The products of a rank's experts."""

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        """out = sum over a token's experts of weight * expert(x), in float32, in ascending order of experts, rounded
        once. x, out: [num_tokens, hidden_size], may be the same tensor. Experts of other ranks add nothing.
        """
        ...


class LoopedExperts:
    """One expert after another, on any device and for any form of weights."""

    def __init__(self, gate_up: Sequence[Matmul], down: Sequence[Matmul], sizes: ExpertSizes) -> None:
        self.gate_up, self.down, self.sizes = gate_up, down, sizes

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in range(len(self.gate_up)):
            tokens, places = (chosen.experts == self.sizes.held.start + index).nonzero(as_tuple=True)
            if len(tokens):
                total.index_add_(0, tokens, self.expert(index, x, tokens) * chosen.weights[tokens, places, None])
        out.copy_(total)

    def expert(self, index: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """One expert's outputs for the rows `tokens` of x: float32 [len(tokens), hidden_size]."""
        ops, own, gate_up = ops_for(x.device), x[tokens], self.gate_up[index]
        activated = x.new_empty(len(tokens), self.sizes.inner)
        if self.sizes.gated:
            both = x.new_empty(len(tokens), 2 * self.sizes.inner)
            gate_up.forward(own, both)
            ops.activate_and_mul(self.sizes.activation, both, activated)
        else:
            gate_up.forward(own, activated)
            ops.activate(self.sizes.activation, activated)
        wide = torch.empty(len(tokens), x.shape[1], dtype=torch.float32, device=x.device)
        self.down[index].forward(activated, wide)
        return wide


class NativeExperts:
    """All experts by one operation of csrc/cpu, on weights that are packed for it."""

    def __init__(self, gate_up: Sequence[NativeMatmul], down: Sequence[NativeMatmul], sizes: ExpertSizes) -> None:
        weights = [each.packed for each in gate_up], [each.packed for each in down]
        self.packed = PackedExperts(*weights, sizes.held.start, sizes.activation, gated=sizes.gated)

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        self.packed.forward(x, chosen, out)
