"""DeepSeek V2 and V3: latent attention; from V3.2 on it is sparse."""

import re
from typing import ClassVar

import torch

from vllm_lite.layers.attention.attention_block import Attention
from vllm_lite.layers.attention.latent_attention import LatentAttention
from vllm_lite.layers.attention.sparse_attention import Selection, SparseLatentAttention
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Decoder, Layer

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekLayer(DecoderLayer):
    attention_block: ClassVar[type[Attention]] = LatentAttention


class Deepseek(Decoder):
    layer: ClassVar[type[Layer]] = DeepseekLayer

    def ignores(self, name: str) -> bool:
        """See Decoder.ignores. Also ignores layers after the last one, V3's MTP layers."""
        layer = _LAYER.match(name)
        return super().ignores(name) or (layer is not None and int(layer[1]) >= self.spec.num_layers)


class SparseLayer(DeepseekLayer):
    attention_block: ClassVar[type[Attention]] = SparseLatentAttention


class SparseDeepseek(Deepseek):
    """DeepSeek V3.2 and GLM-5; some layers may attend to the tokens that an earlier layer has chosen."""

    layer: ClassVar[type[Layer]] = SparseLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        self.selection = Selection()
        for layer in self.layers:
            if isinstance(layer.attention, SparseLatentAttention):
                layer.attention.selection = self.selection

    def narrow(
        self, layer: Layer, rows: StepRows, wanted: torch.Tensor, index: int, *, heads: bool = False
    ) -> StepRows:
        self.selection.keep(wanted)
        return super().narrow(layer, rows, wanted, index, heads=heads)


class Mistral(Deepseek):
    """A Mistral that also sees images: the layers of Mistral 4, or Llama's as before it, and Pixtral's tower."""

    def make_layer(self, parts: Parts, index: int) -> Layer:
        kind = DecoderLayer if parts.spec.layers[index].latent is None else DeepseekLayer
        return kind(parts, index)
