"""Qwen3-VL: Qwen's layers, where vectors of the tower's middle layers are added after the first layers."""

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Layer
from vllm_lite.models.llama import Llama


class LayerBehindDeep(DecoderLayer):
    """A layer that first adds vectors from a middle layer of the tower at the image tokens. The addition belongs to the
    end of the previous layer, but that layer's output is added to the stream only here."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.source = layer - 1

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See DecoderLayer.write."""
        residual, source = rows.residual, self.source
        batch.with_vectors(lambda own, _: residual.index_add_(0, own.rows, own.deep[source].to(residual.dtype)))
        super().write(rows, kv, batch, backend)


class Qwen3VL(Llama):
    """Qwen3 or Qwen3-MoE with a vision tower."""

    def make_layer(self, parts: Parts, index: int) -> Layer:
        vision = parts.spec.vision
        is_behind = vision is not None and 1 <= index <= vision.num_deep
        return (LayerBehindDeep if is_behind else self.layer)(parts, index)
