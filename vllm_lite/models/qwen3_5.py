"""Qwen3.5 and 3.6, dense and with experts: Gated DeltaNet layers, and full attention every so many layers."""

from typing import ClassVar

import torch

from vllm_lite.kernels.delta_rule import Segments
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.delta_net import DeltaNetBlock
from vllm_lite.layers.parts import Parts
from vllm_lite.models.decoder import Decoder, Layer


class RecurrentLayer(DecoderLayer):
    names: ClassVar = LayerNames(attention="linear_attn")
    attention_block: ClassVar = DeltaNetBlock


class Qwen3_5(Decoder):  # noqa: N801 (the family's name)
    """Layers of two blocks, each behind a norm; where a layer is recurrent the first of them keeps a state."""

    def make_layer(self, parts: Parts, index: int) -> Layer:
        kind = DecoderLayer if parts.spec.layers[index].recurrent is None else RecurrentLayer
        return kind(parts, index)

    @torch.inference_mode()
    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[torch.Tensor]) -> None:
        """Bring states up to those tokens that the last step left tentative and that have proved right since.

        tokens: int64 [n], their places among the tentative ones; segments: of these n rows.
        """
        rows = self.buffers.rows(len(tokens))
        for layer, states in zip(self.layers, kv_caches, strict=True):
            if isinstance(layer.attention, DeltaNetBlock):
                layer.attention.take_up(tokens, rows, states, segments)
