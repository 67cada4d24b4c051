"""Idefics 3 and SmolVLM: the text part is a Llama. `layer_specs.vision` reads the vision tower."""

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import FAMILIES as LLAMA
from vllm_lite.checkpoint.families.llama import LlamaConfig
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ModelError


class Idefics3Config(LlamaConfig, kw_only=True):
    model_type: str = "llama"


def _unknown(_architecture: str, raw: Idefics3Config) -> ModelSpec:
    raise ModelError(f"text_config.model_type {raw.model_type!r} is not supported; supported: llama")


_IDEFICS3 = Family(Idefics3Config, _unknown, by_type={"llama": LLAMA["LlamaForCausalLM"]})
ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
FAMILIES = dict.fromkeys(ARCHITECTURES, _IDEFICS3)
