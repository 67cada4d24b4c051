"""EXAONE 4: norms after the blocks only."""

from vllm_lite.layers.decoder_layer import PostNormLayer
from vllm_lite.models.decoder import Decoder


class Exaone4(Decoder):
    layer = PostNormLayer
