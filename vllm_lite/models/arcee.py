"""Arcee: Llama whose MLPs have no gate."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.mlp import MLP
from vllm_lite.models.decoder import Decoder, Layer


class ArceeLayer(DecoderLayer):
    mlp_block: ClassVar = MLP


class Arcee(Decoder):
    layer: ClassVar[type[Layer]] = ArceeLayer
