"""OLMo 2 and 3, which differ only in their ModelSpec."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import PostNormLayer
from vllm_lite.models.decoder import Decoder, Layer


class Olmo(Decoder):
    """Llama with norms after the blocks only."""

    layer: ClassVar[type[Layer]] = PostNormLayer
