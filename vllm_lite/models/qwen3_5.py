"""Qwen3-Next, Qwen3.5 and 3.6: Gated DeltaNet layers, and full attention every few layers."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.recurrence.delta_net import DeltaNetBlock
from vllm_lite.models.decoder import Layer
from vllm_lite.models.hybrid import Hybrid


class RecurrentLayer(DecoderLayer):
    names: ClassVar = LayerNames(attention="linear_attn")
    attention_block: ClassVar = DeltaNetBlock


class Qwen3_5(Hybrid):  # noqa: N801 (the family's name)
    """Layers of attention or Gated DeltaNet, and an MLP or experts, each after a norm."""

    recurrent_layer: ClassVar[type[Layer]] = RecurrentLayer
