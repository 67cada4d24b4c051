"""Decoders some of whose layers are recurrent."""

from typing import Any, ClassVar

import torch

from vllm_lite.kernels.recurrent import Segments
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.block import RecurrentBlock
from vllm_lite.models.decoder import Decoder, Layer


class Hybrid(Decoder):
    """A family says what stands for a layer that keeps a state."""

    recurrent_layer: ClassVar[type[Layer]]

    def make_layer(self, parts: Parts, index: int) -> Layer:
        kind = self.layer if parts.spec.layers[index].recurrent is None else self.recurrent_layer
        return kind(parts, index)

    @torch.inference_mode()
    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[Any]) -> None:
        """Bring states up to those tokens that the last step left tentative and that have proved right since.

        tokens: int64 [n], their places among the tentative ones; segments: of these n rows.
        """
        rows = self.buffers.rows(len(tokens))
        for layer, states in zip(self.layers, self.held_of(kv_caches), strict=True):
            if isinstance(layer.attention, RecurrentBlock):
                layer.attention.take_up(tokens, rows, states, segments)
