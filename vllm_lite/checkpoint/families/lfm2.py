"""LFM2: gated short convolutions, and full attention with normed heads every few layers."""

from math import ceil
from typing import Annotated

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
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.short_conv import ShortConvSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

CONV = "conv"
THETA = 1e6


class Lfm2Config(RawConfig, kw_only=True):
    intermediate_size: Size = 12288
    block_ff_dim: Size | None = None
    """An older name of the same, which wins."""
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Positive | None = 1.0
    block_multiple_of: Size = 256
    norm_eps: Positive = 1e-5
    conv_L_cache: Annotated[int, Meta(ge=2, le=16)] = 3  # noqa: N815 (the file's)
    conv_bias: bool = False
    full_attn_idxs: list[Annotated[int, Meta(ge=0)]] | None = None
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    """Likewise."""


def _inner(raw: Lfm2Config) -> int:
    """Elements between the matrices of the MLPs, of which config.json has what they would be without a gate."""
    size = raw.block_ff_dim or raw.intermediate_size
    if not raw.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if raw.block_ffn_dim_multiplier is None:
        return size
    return raw.block_multiple_of * ceil(int(raw.block_ffn_dim_multiplier * size) / raw.block_multiple_of)


def _lfm2(architecture: str, raw: Lfm2Config) -> ModelSpec:
    if raw.conv_bias:
        raise ModelError("conv_bias true is not supported; convolutions have no bias in this family")
    attention = attention_of(raw)
    full = LayerSpec(attention, rope_of(raw, attention.head_size, theta=THETA))
    conv = LayerSpec(attention, None, recurrent=ShortConvSpec(raw.hidden_size, raw.conv_L_cache))
    indices = raw.full_attn_idxs
    types = layer_types_of(raw, lambda layer: FULL if indices is None or layer in indices else CONV, (FULL, CONV))
    if FULL not in types:
        raise ModelError(f"layer_types has no {FULL}; at least one layer must keep KV")
    layers = tuple(full if kind == FULL else conv for kind in types)
    tied = raw.tie_word_embeddings if raw.tie_embedding is None else raw.tie_embedding
    norm = NormSpec(raw.norm_eps)
    return decoder(architecture, raw, layers, norm, _inner(raw), qk_norm="head", tie_word_embeddings=tied)


FAMILIES = {"Lfm2ForCausalLM": Family(Lfm2Config, _lfm2)}
