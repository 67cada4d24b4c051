"""Gemma 1, and Gemma 2 and 3, which also have norms after their blocks. Gemma 3 may take images."""

from typing import ClassVar

import torch

from vllm_lite.layers.decoder_layer import SandwichLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Decoder, Layer


class Gemma(Decoder):
    """Llama's layers, with token embeddings multiplied by a factor that is first rounded to the model's dtype: bfloat16
    rounds sqrt(3072) = 55.4256 to 55.5, with which the model was trained."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        self.embedding_scale = torch.tensor(self.spec.embedding_scale, dtype=parts.dtype).item()


class Gemma2(Gemma):
    """Gemma 2 and 3, which differ only in their ModelSpec."""

    layer: ClassVar[type[Layer]] = SandwichLayer
