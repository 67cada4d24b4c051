"""LFM3: gated short convolutions, windows and full attention, with norms before and after each block."""

from typing import ClassVar

from vllm_lite.layers.attention.attention_block import Attention, AttentionBlock
from vllm_lite.layers.decoder_layer import LayerNames, SandwichLayer
from vllm_lite.layers.recurrence.short_conv import ShortConvBlock
from vllm_lite.models.decoder import DecoderNames
from vllm_lite.models.hybrid import Hybrid
from vllm_lite.models.lfm2 import Lfm2MLP


class Lfm3Layer(SandwichLayer):
    names: ClassVar = LayerNames(
        attention_norm="operator_norm",
        after_attention="post_operator_norm",
        mlp_norm="ffn_norm",
        mlp="feed_forward",
        after_mlp="post_ffn_norm",
    )
    attention_block: ClassVar[type[Attention]] = AttentionBlock
    mlp_block: ClassVar = Lfm2MLP


class Lfm3ConvLayer(Lfm3Layer):
    names: ClassVar = Lfm3Layer.names._replace(attention="conv")
    attention_block: ClassVar = ShortConvBlock


class Lfm3(Hybrid):
    """LFM3. Its final norm is named after the embedding, to which the head is tied."""

    names: ClassVar = DecoderNames(norm="model.embedding_norm")
    layer: ClassVar = Lfm3Layer
    recurrent_layer: ClassVar = Lfm3ConvLayer
