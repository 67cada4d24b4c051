"""Apertus: Llama with norms on Q and K, and ungated MLPs with a trained activation (xIELU)."""

from typing import Any, Literal

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive

ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Default rope."""


class ApertusConfig(LlamaConfig, kw_only=True):
    hidden_act: Literal["xielu"] = "xielu"
    rms_norm_eps: Positive = 1e-5
    mlp_bias: Literal[False] = False
    qk_norm: Literal[True] = True
    post_norm: Literal[False] = False


def _apertus(architecture: str, raw: ApertusConfig) -> ModelSpec:
    if raw.rope_parameters is None and raw.rope_scaling is None:
        raw.rope_parameters = ROPE if raw.rope_theta is None else ROPE | {"rope_theta": raw.rope_theta}
    layers = llama_layers(raw, full_attention(raw), theta=ROPE["rope_theta"])
    weights = 4 * len(layers)  # parameters of the activations
    own = {"qk_norm": "head", "gated_mlp": False, "activation": "xielu", "extra_parameters": weights}
    return llama_like(architecture, raw, layers, **own)


FAMILIES = {"ApertusForCausalLM": Family(ApertusConfig, _apertus)}
