"""DeepSeek V3.2 and GLM-5: DeepSeek V3 with sparse attention to tokens chosen by an index (DSA)."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.glm_moe_lite import Glm4MoeLiteConfig, read_kinds
from vllm_lite.checkpoint.families.mixture import Index
from vllm_lite.checkpoint.layer_specs.latent import IndexSpec
from vllm_lite.checkpoint.model_spec import ModelSpec, make_kv_groups
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}
"""Kinds of layers in `index_topk_pattern`."""


class DeepseekV32Config(Glm4MoeLiteConfig, kw_only=True):
    rms_norm_eps: Positive = 1e-6
    first_k_dense_replace: Index = 3
    index_topk: Size = 2048
    index_head_dim: Size = 128
    index_n_heads: Size = 64


class GlmMoeDsaConfig(DeepseekV32Config, kw_only=True):
    rms_norm_eps: Positive = 1e-5
    index_n_heads: Size = 32
    indexer_rope_interleave: bool = True
    indexer_types: list[Literal["full", "shared"]] | None = None
    index_topk_pattern: Annotated[str, Meta(max_length=10_000)] | list[str] | None = None
    index_topk_freq: Size = 1
    index_skip_topk_offset: Index = 2


def _index(raw: DeepseekV32Config, *, interleaved: bool) -> IndexSpec:
    if raw.q_lora_rank is None:
        raise ModelError("q_lora_rank is missing; the index of this family reads the vector that Q is made of")
    if raw.index_head_dim < raw.qk_rope_head_dim:
        raise ModelError(f"index_head_dim {raw.index_head_dim} is less than qk_rope_head_dim {raw.qk_rope_head_dim}")
    return IndexSpec(raw.index_n_heads, raw.index_head_dim, raw.index_topk, interleaved)


def _with_index(spec: ModelSpec, index: IndexSpec, kinds: Sequence[str]) -> ModelSpec:
    """Add the index to each layer: its own, or that of an earlier layer."""
    if len(kinds) != spec.num_layers or kinds[0] != FULL or set(kinds) - {FULL, SHARED}:
        raise ModelError(
            f"indexer_types {', '.join(kinds)[:80]} must have {FULL} or {SHARED} for each of {spec.num_layers} layers, "
            f"and {FULL} for the first"
        )
    layers = []
    for layer, kind in zip(spec.layers, kinds, strict=True):
        own = msgspec.structs.replace(index, is_shared=kind == SHARED)
        latent = layer.latent and msgspec.structs.replace(layer.latent, index=own)
        attention = msgspec.structs.replace(layer.attention, index_size=latent.index_size if latent else 0)
        layers.append(msgspec.structs.replace(layer, attention=attention, latent=latent))
    return msgspec.structs.replace(spec, layers=tuple(layers), kv_groups=make_kv_groups(layers))


def _v32(architecture: str, raw: DeepseekV32Config) -> ModelSpec:
    spec = read_kinds(architecture, raw)
    return _with_index(spec, _index(raw, interleaved=False), [FULL] * spec.num_layers)


def _glm(architecture: str, raw: GlmMoeDsaConfig) -> ModelSpec:
    spec = read_kinds(architecture, raw)
    return _with_index(spec, _index(raw, interleaved=raw.indexer_rope_interleave), _kinds(raw))


def _kinds(raw: GlmMoeDsaConfig) -> Sequence[str]:
    """Whether each layer has an index of its own: by a list, a pattern, or an interval and an offset."""
    if raw.indexer_types is not None:
        return raw.indexer_types
    if raw.index_topk_pattern is not None:
        return [LETTERS.get(kind, kind) for kind in raw.index_topk_pattern]
    first = raw.index_skip_topk_offset - 1
    layers = range(raw.num_hidden_layers)
    return [FULL if max(layer - first, 0) % raw.index_topk_freq == 0 else SHARED for layer in layers]


ALIASES = {"num_local_experts": "n_routed_experts"}
FAMILIES = {
    "DeepseekV32ForCausalLM": Family(DeepseekV32Config, _v32, ALIASES),
    "GlmMoeDsaForCausalLM": Family(GlmMoeDsaConfig, _glm, ALIASES),
}
