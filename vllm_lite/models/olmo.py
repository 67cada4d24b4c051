"""OLMo 2 and 3, which differ from each other only by what ModelSpec says."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import PostNormLayer
from vllm_lite.models.decoder import Decoder, Layer


class Olmo(Decoder):
    """Norms behind the blocks alone."""

    layer: ClassVar[type[Layer]] = PostNormLayer
