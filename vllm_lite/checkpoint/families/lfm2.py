"""LFM2: gated short convolutions, and full attention with normed heads every few layers; with or without experts."""

from math import ceil
from typing import Annotated, Literal

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
from vllm_lite.checkpoint.families.mixture import Index, NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size

CONV = "conv"
THETA = 1e6


class Lfm2Config(RawConfig, kw_only=True):
    intermediate_size: Size = 12288
    block_ff_dim: Size | None = None
    """An older name of intermediate_size, which overrides it."""
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Positive | None = 1.0
    block_multiple_of: Size = 256
    norm_eps: Positive = 1e-5
    conv_L_cache: Annotated[int, Meta(ge=2, le=16)] = 3  # noqa: N815 (the file's)
    conv_bias: Literal[False] = False
    full_attn_idxs: list[Annotated[int, Meta(ge=0)]] | None = None
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    """An older name of tie_word_embeddings, which overrides it."""


class Lfm2MoeConfig(Lfm2Config, kw_only=True):
    intermediate_size: Size = 7168
    block_auto_adjust_ff_dim: bool = False
    num_dense_layers: Index = 2
    num_experts: NumExperts = 32
    num_experts_per_tok: NumExperts = 4
    moe_intermediate_size: Size = 1792
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0


def _inner(raw: Lfm2Config) -> int:
    """Intermediate size of the MLPs; config.json has the size for an ungated MLP."""
    size = raw.block_ff_dim or raw.intermediate_size
    if not raw.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if raw.block_ffn_dim_multiplier is None:
        return size
    return raw.block_multiple_of * ceil(int(raw.block_ffn_dim_multiplier * size) / raw.block_multiple_of)


def _layers(raw: Lfm2Config) -> tuple[LayerSpec, ...]:
    attention = attention_of(raw)
    full = LayerSpec(attention, rope_of(raw, attention.head_size, theta=THETA))
    conv = LayerSpec(attention, None, recurrent=ShortConvSpec(raw.hidden_size, raw.conv_L_cache))
    indices = raw.full_attn_idxs
    types = layer_types_of(raw, lambda layer: FULL if indices is None or layer in indices else CONV, (FULL, CONV))
    return tuple(full if kind == FULL else conv for kind in types)


def _decoder(architecture: str, raw: Lfm2Config, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    tied = raw.tie_word_embeddings if raw.tie_embedding is None else raw.tie_embedding
    norm = NormSpec(raw.norm_eps)
    return decoder(architecture, raw, layers, norm, _inner(raw), qk_norm="head", tie_word_embeddings=tied)


def _lfm2(architecture: str, raw: Lfm2Config) -> ModelSpec:
    return _decoder(architecture, raw, _layers(raw))


def _lfm2_moe(architecture: str, raw: Lfm2MoeConfig) -> ModelSpec:
    routing = routing_of(
        raw.num_experts,
        raw.num_experts_per_tok,
        scoring="sigmoid",
        choice_bias=raw.use_expert_bias,
        renormalize=raw.norm_topk_prob,
        epsilon=1e-6,
        scale=raw.routed_scaling_factor,
    )
    experts = ExpertsSpec(routing, raw.moe_intermediate_size)
    return _decoder(architecture, raw, with_experts(_layers(raw), experts, lambda index: index >= raw.num_dense_layers))


FAMILIES = {
    "Lfm2ForCausalLM": Family(Lfm2Config, _lfm2),
    "Lfm2MoeForCausalLM": Family(Lfm2MoeConfig, _lfm2_moe),
}
