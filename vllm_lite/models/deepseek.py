"""DeepSeek V2 and V3: latent attention."""

import re
from typing import ClassVar

from vllm_lite.layers.attention_block import Attention
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.latent_attention import LatentAttention
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Decoder, Layer

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekLayer(DecoderLayer):
    attention_block: ClassVar[type[Attention]] = LatentAttention


class Deepseek(Decoder):
    layer: ClassVar[type[Layer]] = DeepseekLayer

    def ignores(self, name: str) -> bool:
        """Also layers behind the last one, which V3 has to predict several tokens at once."""
        layer = _LAYER.match(name)
        return super().ignores(name) or (layer is not None and int(layer[1]) >= self.spec.num_layers)


class Mistral(Deepseek):
    """The text part of a Mistral that also sees images: the layers of Mistral 4, or Llama's as before it."""

    def make_layer(self, parts: Parts, index: int) -> Layer:
        kind = DecoderLayer if parts.spec.layers[index].latent is None else DeepseekLayer
        return kind(parts, index)
