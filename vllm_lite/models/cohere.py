"""Cohere 2: attention and MLP read one norm and are added together."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import ParallelLayer
from vllm_lite.models.decoder import Decoder, Layer


class Cohere2(Decoder):
    layer: ClassVar[type[Layer]] = ParallelLayer
