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


class AttentionLayer(DecoderLayer):
    names: ClassVar = LayerNames(attention_norm="operator_norm", mlp_norm="ffn_norm", mlp="feed_forward")
    attention_block: ClassVar[type[Attention]] = Lfm2Attention
    mlp_block: ClassVar = Lfm2MLP


class ConvLayer(AttentionLayer):
    names: ClassVar = AttentionLayer.names._replace(attention="conv")
    attention_block: ClassVar = ShortConvBlock


class SparseAttentionLayer(AttentionLayer):
    """Attention layer with experts, whose tensors have the names of other families."""

    names: ClassVar = AttentionLayer.names._replace(mlp="mlp")


class SparseConvLayer(ConvLayer):
    """Convolution layer with experts, see SparseAttentionLayer."""

    names: ClassVar = ConvLayer.names._replace(mlp="mlp")


class Lfm2(Hybrid):
    """LFM2. Its final norm is named after the embedding, to which the head is tied."""

    names: ClassVar = DecoderNames(norm="model.embedding_norm")
    layer: ClassVar = AttentionLayer
    recurrent_layer: ClassVar = ConvLayer

    def make_layer(self, parts: Parts, index: int) -> Layer:
        own = parts.spec.layers[index]
        if own.experts is None:
            return super().make_layer(parts, index)
        return SparseAttentionLayer(parts, index) if own.recurrent is None else SparseConvLayer(parts, index)
