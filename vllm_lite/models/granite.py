"""Granite 3 and 4: Llama with block outputs scaled by `residual_scale`; in Granite 4 most layers are recurrent."""

from typing import ClassVar

from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.mlp import FusedGatedMLP, GatedNames
from vllm_lite.layers.moe.experts import SparseMLP, SparseNames
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.mamba import MambaBlock
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.hybrid import Hybrid


class GraniteExperts(SparseMLP):
    names: ClassVar = SparseNames(shared_matrices=FusedGatedMLP.names)


class GraniteLayer(DecoderLayer):
    """x + residual_scale * f(norm(x))."""

    sparse_block: ClassVar = GraniteExperts

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.scale = parts.spec.residual_scale

    def after_attention(self, rows: StepRows) -> None:
        self.ops.scale(rows.hidden, self.scale)

    def after_mlp(self, rows: StepRows) -> None:
        self.ops.scale(rows.hidden, self.scale)


class Granite(Decoder):
    """Granite 3. Its factors of embeddings, attention scores and logits are in the ModelSpec."""

    layer = GraniteLayer


class HybridMLP(FusedGatedMLP):
    """The MLP of Granite 4, called a shared expert even in models without experts."""

    names: ClassVar = GatedNames(
        "shared_experts.gate_up_proj", "shared_experts.gate_up_proj", "shared_experts.down_proj"
    )


class GraniteHybridLayer(GraniteLayer):
    mlp_block: ClassVar = HybridMLP


class GraniteMambaLayer(GraniteHybridLayer):
    names: ClassVar = LayerNames(attention="mamba")
    attention_block: ClassVar = MambaBlock


class GraniteHybrid(Hybrid):
    """Granite 4: Mamba-2 layers, and attention every few layers."""

    layer: ClassVar = GraniteHybridLayer
    recurrent_layer: ClassVar = GraniteMambaLayer
