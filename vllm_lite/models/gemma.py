"""Gemma 1, and Gemma 2 and 3, which have norms behind their blocks, too. Gemma 3 may see images."""

from typing import ClassVar

import torch

from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma3VisionSpec
from vllm_lite.layers.decoder_layer import SandwichLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.gemma import Gemma3Tower
from vllm_lite.models.decoder import Decoder, Layer


class Gemma(Decoder):
    """Llama's layers, whose token vectors are multiplied by a number that is rounded to the model's dtype first: of
    sqrt(3072) = 55.4256 bfloat16 makes 55.5, and with that the model was trained."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        self.embedding_scale = torch.tensor(self.spec.embedding_scale, dtype=parts.dtype).item()


class Gemma2(Gemma):
    """Gemma 2 and 3, which differ from each other only by what ModelSpec says."""

    layer: ClassVar[type[Layer]] = SandwichLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        vision = parts.spec.vision
        self.tower = Gemma3Tower(parts, vision) if isinstance(vision, Gemma3VisionSpec) else None
