"""Decoders in which some layers are recurrent."""

from typing import Any, ClassVar

import torch

from vllm_lite.kernels.recurrent import Segments
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.block import RecurrentBlock
from vllm_lite.models.decoder import Decoder, Layer


class Hybrid(Decoder):
    """A decoder with recurrent layers. A family names the class of these."""

    recurrent_layer: ClassVar[type[Layer]]

    def make_layer(self, parts: Parts, index: int) -> Layer:
        kind = self.layer if parts.spec.layers[index].recurrent is None else self.recurrent_layer
        return kind(parts, index)

    @torch.inference_mode()
    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[Any]) -> None:
        """Update the recurrent states by the last step's draft tokens that have been accepted.

        tokens: int64 [n], indices into the step's `tentative` rows; segments: of these n rows.
        """
        rows = self.buffers.rows(len(tokens))
        for layer, states in zip(self.layers, self.held_of(kv_caches), strict=True):
            if isinstance(layer.attention, RecurrentBlock):
                layer.attention.take_up(tokens, rows, states, segments)
