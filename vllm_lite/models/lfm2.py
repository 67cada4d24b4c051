"""LFM2: gated short convolutions, and full attention every few layers; with experts or without."""

from typing import ClassVar

from vllm_lite.layers.attention.attention_block import Attention, AttentionBlock, AttentionNames
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.mlp import GatedMLP, GatedNames
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.short_conv import ShortConvBlock
from vllm_lite.models.decoder import DecoderNames, Layer
from vllm_lite.models.hybrid import Hybrid


class Lfm2Attention(AttentionBlock):
    names = AttentionNames(output="out_proj", query_norm="q_layernorm", key_norm="k_layernorm")


class Lfm2MLP(GatedMLP):
    names: ClassVar = GatedNames("w1", "w3", "w2")


class Lfm2Layer(DecoderLayer):
    names: ClassVar = LayerNames(attention_norm="operator_norm", mlp_norm="ffn_norm", mlp="feed_forward")
    attention_block: ClassVar[type[Attention]] = Lfm2Attention
    mlp_block: ClassVar = Lfm2MLP


class Lfm2ConvLayer(Lfm2Layer):
    names: ClassVar = Lfm2Layer.names._replace(attention="conv")
    attention_block: ClassVar = ShortConvBlock


class Lfm2SparseLayer(Lfm2Layer):
    """Attention layer with experts, whose tensors have the names of other families."""

    names: ClassVar = Lfm2Layer.names._replace(mlp="mlp")


class Lfm2SparseConvLayer(Lfm2ConvLayer):
    """Convolution layer with experts, see Lfm2SparseLayer."""

    names: ClassVar = Lfm2ConvLayer.names._replace(mlp="mlp")


class Lfm2(Hybrid):
    """LFM2. Its final norm is named after the embedding, to which the head is tied."""

    names: ClassVar = DecoderNames(norm="model.embedding_norm")
    layer: ClassVar = Lfm2Layer
    recurrent_layer: ClassVar = Lfm2ConvLayer

    def make_layer(self, parts: Parts, index: int) -> Layer:
        own = parts.spec.layers[index]
        if own.experts is None:
            return super().make_layer(parts, index)
        return Lfm2SparseLayer(parts, index) if own.recurrent is None else Lfm2SparseConvLayer(parts, index)
