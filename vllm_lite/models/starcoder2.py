"""StarCoder2: Llama with LayerNorms and an MLP without a gate."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.mlp import MLP, MLPNames
from vllm_lite.models.decoder import Decoder, Layer


class Starcoder2MLP(MLP):
    names: ClassVar = MLPNames(up="c_fc", down="c_proj")


class Starcoder2Layer(DecoderLayer):
    mlp_block: ClassVar = Starcoder2MLP


class Starcoder2(Decoder):
    layer: ClassVar[type[Layer]] = Starcoder2Layer
