"""Granite 3: Llama with multipliers on token embeddings, scores, block outputs, and logits; with or without experts.

Granite 4 adds Mamba-2 layers, with attention every few layers, mostly without rope.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    Family,
    attention_of,
    layer_types_of,
    layers_of,
    rope_of,
)
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_like
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.families.state_space import ConvSize, Limits, step_limits
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

ATTENTION = ("attention", FULL)
RECURRENT = ("mamba", "linear_attention")
"""Names of the two kinds in `layer_types`."""


class GraniteConfig(LlamaConfig, kw_only=True):
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    """The scale of scores itself, instead of a factor on the usual one."""
    logits_scaling: Positive = 1.0
    """Divisor of logits."""


class GraniteMoeConfig(GraniteConfig, kw_only=True):
    num_local_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2
    shared_intermediate_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class GraniteHybridConfig(GraniteMoeConfig, kw_only=True):
    """Keys of Granite 4; without experts, both of their numbers are 0."""

    num_local_experts: Annotated[int, Meta(ge=0, le=2**16)] = 8
    num_experts_per_tok: Annotated[int, Meta(ge=0, le=2**16)] = 2
    shared_intermediate_size: Size = 1024
    position_embedding_type: Literal["rope", "nope"] | None = None
    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_state: Size = 256
    mamba_d_conv: ConvSize = 4
    mamba_expand: Size = 2
    mamba_n_groups: Literal[1] = 1
    mamba_conv_bias: Literal[True] = True
    mamba_proj_bias: Literal[False] = False
    time_step_limit: Limits = None


def _granite(architecture: str, raw: GraniteConfig, experts: ExpertsSpec | None = None) -> ModelSpec:
    attention = msgspec.structs.replace(attention_of(raw), scale=raw.attention_multiplier)
    windows = full_attention(raw)
    layers = layers_of(attention, windows, [rope_of(raw, attention.head_size)] * len(windows))
    return scaled(architecture, raw, layers if experts is None else with_experts(layers, experts))


def scaled(architecture: str, raw: GraniteConfig, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """Make a decoder's spec with the multipliers on token embeddings, blocks and logits."""
    return llama_like(
        architecture,
        raw,
        layers,
        embedding_scale=raw.embedding_multiplier,
        residual_scale=raw.residual_multiplier,
        logits_scale=1 / raw.logits_scaling,
    )


def _granite_moe(architecture: str, raw: GraniteMoeConfig) -> ModelSpec:
    """Read a Granite with experts. A softmax over the chosen logits equals the softmax over all, renormalized over the
    chosen."""
    routing = routing_of(raw.num_local_experts, raw.num_experts_per_tok, renormalize=True)
    shared = raw.shared_intermediate_size if architecture == "GraniteMoeSharedForCausalLM" else 0
    return _granite(architecture, raw, ExpertsSpec(routing, raw.intermediate_size, shared, stored="fused"))


def _mamba(raw: GraniteHybridConfig) -> MambaSpec:
    inner = raw.mamba_expand * raw.hidden_size
    head_size = inner // raw.mamba_n_heads if raw.mamba_d_head == "auto" else raw.mamba_d_head
    if raw.mamba_n_heads * head_size != inner:
        raise ModelError(f"{raw.mamba_n_heads} mamba_n_heads of {head_size} are not mamba_expand * hidden_size {inner}")
    limits = step_limits(raw.time_step_limit)
    return MambaSpec(raw.mamba_n_heads, head_size, raw.mamba_d_state, raw.mamba_d_conv, limits)


def _hybrid(architecture: str, raw: GraniteHybridConfig) -> ModelSpec:
    attention = msgspec.structs.replace(attention_of(raw), scale=raw.attention_multiplier)
    rope = rope_of(raw, attention.head_size) if raw.position_embedding_type == "rope" else None
    full, mamba = LayerSpec(attention, rope), LayerSpec(attention, None, recurrent=_mamba(raw))
    types = layer_types_of(raw, lambda _: RECURRENT[0], (*ATTENTION, *RECURRENT))
    layers = tuple(full if kind in ATTENTION else mamba for kind in types)
    if raw.num_local_experts:
        routing = routing_of(raw.num_local_experts, raw.num_experts_per_tok, renormalize=True)
        experts = ExpertsSpec(routing, raw.intermediate_size, raw.shared_intermediate_size, stored="fused")
        return scaled(architecture, raw, with_experts(layers, experts))
    return scaled(architecture, msgspec.structs.replace(raw, intermediate_size=raw.shared_intermediate_size), layers)


FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family(GraniteHybridConfig, _hybrid, {"layers_block_type": "layer_types"}),
    "GraniteForCausalLM": Family(GraniteConfig, _granite),
    "GraniteMoeForCausalLM": Family(GraniteMoeConfig, _granite_moe),
    "GraniteMoeSharedForCausalLM": Family(GraniteMoeConfig, _granite_moe),
}
