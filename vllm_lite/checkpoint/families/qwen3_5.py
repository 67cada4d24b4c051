"""Qwen3.5 and 3.6: Gated DeltaNet layers and, at intervals, full attention with a gate on its output.

For models that also take images, this is the text part. Norm weights are stored as differences from 1, except in
recurrent layers.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    Family,
    RawConfig,
    attention_of,
    decoder,
    layer_types_of,
    rope_of,
)
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

LINEAR = "linear_attention"
HEAD_DIM = 256
ROTATED = 0.25
"""Default fraction of each head that is rotated."""


class Qwen35Config(RawConfig, kw_only=True):
    rms_norm_eps: Positive = 1e-6
    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Annotated[int, Meta(ge=2, le=16)] = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    attn_output_gate: Literal[True] = True
    attention_bias: bool = False


class Qwen35DenseConfig(Qwen35Config, kw_only=True):
    intermediate_size: Size


class Qwen35MoeConfig(Qwen35Config, kw_only=True):
    num_experts: NumExperts
    num_experts_per_tok: NumExperts
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Size


def _recurrent(raw: Qwen35Config) -> DeltaNetSpec:
    keys, values = raw.linear_num_key_heads, raw.linear_num_value_heads
    if values % keys:
        raise ModelError(f"linear_num_key_heads {keys} does not divide linear_num_value_heads {values}")
    return DeltaNetSpec(
        keys, values, raw.linear_key_head_dim, raw.linear_value_head_dim, conv_size=raw.linear_conv_kernel_dim
    )


def hybrid_layers(raw: Qwen35Config) -> tuple[LayerSpec, ...]:
    """The layers by their types, without experts."""
    attention = attention_of(raw, default_head_dim=HEAD_DIM)
    rope = rope_of(raw, attention.head_size, partial_rotary_factor=ROTATED)
    full = LayerSpec(attention, rope, output_gate="elements beside Q")
    linear = LayerSpec(attention, None, recurrent=_recurrent(raw))
    interval = raw.full_attention_interval
    types = layer_types_of(raw, lambda layer: LINEAR if (layer + 1) % interval else FULL, (FULL, LINEAR))
    return tuple(full if kind == FULL else linear for kind in types)


def hybrid_decoder(architecture: str, raw: Qwen35Config, layers: tuple[LayerSpec, ...], inner: int) -> ModelSpec:
    """Make the spec of these layers; `inner`: intermediate size of its MLPs."""
    norm = NormSpec(raw.rms_norm_eps, "wide rms", plus_one=True)
    own: dict[str, Any] = {"qk_norm": "head", "qkv_bias": raw.attention_bias, "output_bias": raw.attention_bias}
    return decoder(architecture, raw, layers, norm, inner, **own)


def _dense(architecture: str, raw: Qwen35DenseConfig) -> ModelSpec:
    return hybrid_decoder(architecture, raw, hybrid_layers(raw), raw.intermediate_size)


def experts_of(raw: Qwen35MoeConfig, *, renormalize: bool) -> ExpertsSpec:
    routing = routing_of(raw.num_experts, raw.num_experts_per_tok, renormalize=renormalize)
    return ExpertsSpec(routing, raw.moe_intermediate_size, raw.shared_expert_intermediate_size, shared_gate=True)


def _mixture(architecture: str, raw: Qwen35MoeConfig) -> ModelSpec:
    experts = experts_of(raw, renormalize=True)
    # No layer has a dense MLP; the size must only be divisible among ranks.
    return hybrid_decoder(architecture, raw, with_experts(hybrid_layers(raw), experts), raw.moe_intermediate_size)


FAMILIES = {
    "Qwen3_5ForCausalLM": Family(Qwen35DenseConfig, _dense),
    "Qwen3_5ForConditionalGeneration": Family(Qwen35DenseConfig, _dense),
    "Qwen3_5MoeForCausalLM": Family(Qwen35MoeConfig, _mixture),
    "Qwen3_5MoeForConditionalGeneration": Family(Qwen35MoeConfig, _mixture),
}
