"""The matrix products of a layer's experts: the seam for fused operations. The loop over experts is the reference."""

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
    """Common sizes of a rank's experts."""

    held: Split
    """Which of the layer's experts the rank has."""
    inner: int
    """Elements between an expert's matrices."""
    activation: Activation
    gated: bool = True


class ExpertMatmul(Protocol):
    """The experts that a rank holds."""

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        """out = sum over a token's experts of weight * expert(x), in float32 in the order of their numbers, rounded
        once. x, out: [num_tokens, hidden_size], which may be the same. Experts of other ranks add nothing.
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
        """One expert's outputs for some of the rows of x: float32 [len(tokens), hidden_size]."""
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
