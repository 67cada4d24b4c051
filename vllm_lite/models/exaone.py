"""EXAONE 4: norms behind the blocks only."""

from vllm_lite.layers.decoder_layer import PostNormLayer
from vllm_lite.models.decoder import Decoder


class Exaone4(Decoder):
    layer = PostNormLayer
