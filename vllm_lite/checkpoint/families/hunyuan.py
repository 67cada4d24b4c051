"""HunYuan's dense models: Llama with norms on Q and K after rope, and a theta scaled by a fixed alpha."""

from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.layer_specs.rope import DEFAULT_THETA
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive, convert
from vllm_lite.errors import ModelError


class HunYuanConfig(LlamaConfig, kw_only=True):
    rms_norm_eps: Positive = 1e-5
    use_qk_norm: Literal[True] = True


class _Stretch(msgspec.Struct):
    """Rope parameters with an `alpha`, which multiplies theta by alpha^(size / (size - 2))."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    alpha: Positive | None = None


def _stretched(raw: HunYuanConfig, values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return rope parameters with the scaled theta: with an alpha, the type "dynamic" does not depend on the length,
    and has no factor."""
    if values is None:
        return None
    said = convert(values, _Stretch, within="rope_parameters")
    if said.alpha is None or (said.rope_type or said.type) != "dynamic":
        return values
    size = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    if size <= 2:
        raise ModelError(f"head_dim {size} is too small for a rope with an alpha; it must be more than 2")
    theta = said.rope_theta or raw.rope_theta or DEFAULT_THETA
    return {"rope_type": "default", "rope_theta": theta * said.alpha ** (size / (size - 2))}


def _hunyuan(architecture: str, raw: HunYuanConfig) -> ModelSpec:
    raw.rope_parameters, raw.rope_scaling = _stretched(raw, raw.rope_parameters), _stretched(raw, raw.rope_scaling)
    return llama_like(architecture, raw, llama_layers(raw, full_attention(raw)), qk_norm="head", mlp_bias=False)


FAMILIES = {"HunYuanDenseV1ForCausalLM": Family(HunYuanConfig, _hunyuan)}
