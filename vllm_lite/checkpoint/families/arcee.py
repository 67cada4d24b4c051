"""Arcee: Llama with ungated MLPs and squared relu."""

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive


class ArceeConfig(LlamaConfig, kw_only=True):
    hidden_act: str = "relu2"
    rms_norm_eps: Positive = 1e-5


def _arcee(architecture: str, raw: ArceeConfig) -> ModelSpec:
    return llama_like(architecture, raw, llama_layers(raw, full_attention(raw)), gated_mlp=False)


FAMILIES = {"ArceeForCausalLM": Family(ArceeConfig, _arcee)}
