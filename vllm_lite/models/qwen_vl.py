"""Qwen2-VL to Qwen3-VL: the layers of Qwen, which read the vectors of a tower among those of tokens."""

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.layer_specs.qwen_vision import Qwen2VisionSpec, Qwen3VisionSpec
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.qwen import Qwen3Tower
from vllm_lite.layers.vision.qwen2 import Qwen2Tower
from vllm_lite.models.decoder import Layer
from vllm_lite.models.llama import Llama


class Qwen2VL(Llama):
    """Qwen2's layers; Qwen2.5-VL's differ by their tower alone."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        vision = parts.spec.vision
        self.tower = Qwen2Tower(parts, vision) if isinstance(vision, Qwen2VisionSpec) else None


class LayerBehindDeep(DecoderLayer):
    """A layer that begins by adding, at the places of images, what the tower made in its midst. It belongs behind the
    layer before, whose output is still to be added, so that it reads both."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.source = layer - 1

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See DecoderLayer.write."""
        residual, source = rows.residual, self.source
        batch.with_vectors(lambda own, _: residual.index_add_(0, own.rows, own.deep[source].to(residual.dtype)))
        super().write(rows, kv, batch, backend)


class Qwen3VL(Llama):
    """Qwen3's layers, or those of Qwen3-MoE. Behind each of the first ones a vector of the tower is added, too."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        vision = parts.spec.vision
        self.tower = Qwen3Tower(parts, vision) if isinstance(vision, Qwen3VisionSpec) else None

    def make_layer(self, parts: Parts, index: int) -> Layer:
        vision = parts.spec.vision
        is_behind = vision is not None and 1 <= index <= vision.num_deep
        return (LayerBehindDeep if is_behind else self.layer)(parts, index)
