"""LLaVA, LLaVA-NeXT, LLaVA-OneVision, and Pixtral: Llama's layers, with vectors of a vision tower in place of
placeholder tokens."""

from vllm_lite.checkpoint.layer_specs.anyres import AnyresSpec
from vllm_lite.checkpoint.layer_specs.pixtral import PixtralVisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.anyres import AnyresTower
from vllm_lite.layers.vision.pixtral import PixtralTower
from vllm_lite.models.llama import Llama


class Llava(Llama):
    """Llama with a vision tower."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        vision = parts.spec.vision
        if isinstance(vision, PixtralVisionSpec):
            self.tower = PixtralTower(parts, vision)
        elif isinstance(vision, AnyresSpec):
            self.tower = AnyresTower(parts, vision)
