"""Idefics 3 and SmolVLM: Llama's layers, with vectors of a SigLIP tower in place of placeholder tokens."""

from vllm_lite.checkpoint.layer_specs.vision import SiglipSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.siglip import SiglipTower
from vllm_lite.models.llama import Llama


class Idefics3(Llama):
    """Llama with a vision tower that splits images into tiles."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        vision = parts.spec.vision
        self.tower = SiglipTower(parts, vision) if isinstance(vision, SiglipSpec) else None
