"""LLaVA, LLaVA-NeXT, LLaVA-OneVision and Pixtral: the text part is of another family; `layer_specs` reads the vision
tower."""

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import FAMILIES as LLAMA
from vllm_lite.checkpoint.families.llama import LlamaConfig
from vllm_lite.checkpoint.families.mistral import FAMILIES as MISTRAL
from vllm_lite.checkpoint.families.qwen import FAMILIES as QWEN
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ModelError


class LlavaConfig(LlamaConfig, kw_only=True):
    model_type: str = ""


TEXT_PARTS = {
    "llama": LLAMA["LlamaForCausalLM"],
    "mistral": MISTRAL["MistralForCausalLM"],
    "qwen2": QWEN["Qwen2ForCausalLM"],
}
"""Text parts by model_type."""


def _unknown(_architecture: str, raw: LlavaConfig) -> ModelSpec:
    raise ModelError(f"text_config.model_type {raw.model_type!r} is not supported; supported: {', '.join(TEXT_PARTS)}")


_LLAVA = Family(LlavaConfig, _unknown, by_type=TEXT_PARTS)
ARCHITECTURES = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
)
FAMILIES = dict.fromkeys(ARCHITECTURES, _LLAVA)
