"""Nemotron-H: layers of one block each, Mamba-2, attention, an MLP or experts."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import AttentionLayer, LayerNames, MLPLayer
from vllm_lite.layers.mlp import MLP
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.mamba import MambaBlock
from vllm_lite.models.decoder import Layer
from vllm_lite.models.hybrid import Hybrid


class NemotronMambaLayer(AttentionLayer):
    names: ClassVar = LayerNames(attention="mamba")
    attention_block: ClassVar = MambaBlock


class NemotronMLPLayer(MLPLayer):
    mlp_block: ClassVar = MLP


class NemotronH(Hybrid):
    layer: ClassVar[type[Layer]] = AttentionLayer
    recurrent_layer: ClassVar = NemotronMambaLayer

    def make_layer(self, parts: Parts, index: int) -> Layer:
        if not parts.spec.layers[index].attends:
            return NemotronMLPLayer(parts, index)
        return super().make_layer(parts, index)
