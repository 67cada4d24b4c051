"""GLM-4, and its predecessor GLM, which has no norms after its blocks."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames, SandwichLayer
from vllm_lite.layers.mlp import FusedGatedMLP
from vllm_lite.models.decoder import Decoder, Layer


class GlmLayer(DecoderLayer):
    mlp_block: ClassVar = FusedGatedMLP


class Glm4Layer(SandwichLayer):
    names: ClassVar = LayerNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    mlp_block: ClassVar = FusedGatedMLP


class Glm(Decoder):
    layer: ClassVar[type[Layer]] = GlmLayer


class Glm4(Decoder):
    layer: ClassVar[type[Layer]] = Glm4Layer
