"""Granite 3: Llama whose blocks give `residual_scale` times what they compute."""

from typing import ClassVar

from vllm_lite.layers.buffers import Rows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.experts import SparseMLP, SparseNames
from vllm_lite.layers.mlp import FusedGatedMLP
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Decoder


class GraniteExperts(SparseMLP):
    names: ClassVar = SparseNames(shared_matrices=FusedGatedMLP.names)


class GraniteLayer(DecoderLayer):
    """x + residual_scale * f(norm(x))."""

    sparse_block: ClassVar = GraniteExperts

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.scale = parts.spec.residual_scale

    def after_attention(self, rows: Rows) -> None:
        self.ops.scale(rows.hidden, self.scale)

    def after_mlp(self, rows: Rows) -> None:
        self.ops.scale(rows.hidden, self.scale)


class Granite(Decoder):
    """The other factors are in the ModelSpec: of token vectors, scores and logits."""

    layer = GraniteLayer
