"""Qwen3-Next, Qwen3.5 and 3.6: Gated DeltaNet layers, and full attention every few layers."""

from typing import ClassVar

from vllm_lite.checkpoint.layer_specs.qwen_vision import Qwen3VisionSpec
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.delta_net import DeltaNetBlock
from vllm_lite.layers.vision.qwen import Qwen3Tower
from vllm_lite.models.decoder import Layer
from vllm_lite.models.hybrid import Hybrid


class RecurrentLayer(DecoderLayer):
    names: ClassVar = LayerNames(attention="linear_attn")
    attention_block: ClassVar = DeltaNetBlock


class Qwen3_5(Hybrid):  # noqa: N801 (the family's name)
    """Layers of attention or Gated DeltaNet, and an MLP or experts, each after a norm."""

    recurrent_layer: ClassVar[type[Layer]] = RecurrentLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        vision = parts.spec.vision
        self.tower = Qwen3Tower(parts, vision) if isinstance(vision, Qwen3VisionSpec) else None
