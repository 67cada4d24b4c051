"""Apertus: Llama with an activation that has weights, in MLPs without a gate."""

from collections.abc import Iterator
from typing import ClassVar

import torch

from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.mlp import MLP
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot
from vllm_lite.models.decoder import Decoder


class XieluMLP(MLP):
    """An MLP with xIELU, see `Ops.xielu`: a is softplus(alpha_p), c is beta + softplus(alpha_n). Every rank holds all
    four numbers."""

    factors: torch.Tensor  # a, c, beta, eps: float32 [4], by `load`

    def __init__(self, parts: Parts, size: int | None = None) -> None:
        super().__init__(parts, size)
        self.device = parts.device

    def forward(self, x: torch.Tensor, rows: StepRows) -> None:
        """See MLP.forward."""
        self.up.forward(x, out=rows.activated)
        self.ops.xielu(rows.activated, self.factors)
        self.down.forward(rows.activated, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See MLP.weight_groups; also the weights of the activation."""
        yield from super().weight_groups(prefix)
        slots = [(whole_slot(f"{prefix}act_fn.{name}", 1),) for name in ("alpha_p", "alpha_n", "beta", "eps")]
        yield WeightGroup(tuple(WeightStack(slot, torch.float32, self.device) for slot in slots), self.load)

    def load(self, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor) -> None:
        """Keep the weights of the activation: float32 [1] each."""
        softplus = torch.nn.functional.softplus
        self.factors = torch.cat((softplus(alpha_p), beta + softplus(alpha_n), beta, eps))


class ApertusLayer(DecoderLayer):
    names: ClassVar = LayerNames(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    mlp_block = XieluMLP


class Apertus(Decoder):
    layer = ApertusLayer
