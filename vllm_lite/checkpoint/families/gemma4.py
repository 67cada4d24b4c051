"""Gemma 4's text models: sliding layers, larger heads in full layers, experts beside MLPs, K and V shared between
layers, and per-layer token embeddings."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    Family,
    RawConfig,
    activation_of,
    attention_of,
    decoder,
    every_nth,
    layer_types_of,
    ropes_by_type,
)
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId
from vllm_lite.errors import ModelError

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Default rope."""
THETAS = {FULL: 1e6, SLIDING: 1e4}


class Gemma4Config(RawConfig, kw_only=True):
    """Keys of Gemma 4, with the defaults that the text part of a larger model leaves out."""

    vocab_size: Size = 262_144
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)] = 30
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    max_position_embeddings: Size = 131_072
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[TokenId] | None = 1
    tie_word_embeddings: bool = True
    rms_norm_eps: Positive = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    sliding_window: Size = 512
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: Literal["vision"] | None = None
    global_head_dim: Size | None = None
    num_global_key_value_heads: Size | None = None
    per_layer_config: dict[str, dict[str, Size]] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=2**20)] = 256
    vocab_size_per_layer_input: Size | None = None
    enable_moe_block: bool = False
    num_experts: NumExperts | None = None
    top_k_experts: NumExperts | None = None
    moe_intermediate_size: Size | None = None


class Gemma4UnifiedConfig(Gemma4Config, kw_only=True):
    """Keys of unified models, where images and audio pass through the layers like tokens; none has per-layer embeddings
    or experts."""

    max_position_embeddings: Size = 262_144
    sliding_window: Size = 1024
    hidden_size_per_layer_input: Literal[0] = 0
    enable_moe_block: Literal[False] = False


def _heads(raw: Gemma4Config, kind: str, layer: int) -> AttentionSpec:
    """Attention of a layer. transformers writes the heads of full layers as `per_layer_config`, published files as two
    keys."""
    own: dict[str, Any] = {}
    if raw.per_layer_config is not None:
        own = dict(raw.per_layer_config.get(str(layer), {}))
        if others := sorted(own.keys() - {"head_dim", "num_key_value_heads"}):
            raise ModelError(f"per_layer_config of layer {layer} has {', '.join(others[:8])}, which is not supported")
    elif kind == FULL:
        own = {"head_dim": raw.global_head_dim or 512}
        if raw.attention_k_eq_v and raw.num_global_key_value_heads is not None:
            own["num_key_value_heads"] = raw.num_global_key_value_heads
    window = raw.sliding_window if kind == SLIDING else None
    return replace(attention_of(replace(raw, **own)), scale=1.0, window=window)


def _kv_layers(raw: Gemma4Config, types: Sequence[str]) -> list[int | None]:
    """For each layer without K and V of its own, the layer whose K and V it attends to: the last of its type that has
    some."""
    first = len(types) - raw.num_kv_shared_layers
    last = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    if missing := sorted(set(types) - last.keys()):
        raise ModelError(
            f"num_kv_shared_layers {raw.num_kv_shared_layers} leaves no layer of type {', '.join(missing)} with K and V"
        )
    return [None if layer < first else last[kind] for layer, kind in enumerate(types)]


def _experts(raw: Gemma4Config) -> ExpertsSpec | None:
    if not raw.enable_moe_block:
        return None
    if raw.num_experts is None or raw.top_k_experts is None or raw.moe_intermediate_size is None:
        raise ModelError("enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size")
    routing = routing_of(raw.num_experts, raw.top_k_experts, renormalize=True, expert_factors=True)
    return ExpertsSpec(routing, raw.moe_intermediate_size, stored="fused")


def _layers(raw: Gemma4Config, types: Sequence[str]) -> tuple[LayerSpec, ...]:
    experts, kv_layers = _experts(raw), _kv_layers(raw, types)
    if raw.rope_parameters is None:
        raw = replace(raw, rope_parameters=ROPES)

    def layer(index: int, kind: str) -> LayerSpec:
        attention, kv_layer = _heads(raw, kind, index), kv_layers[index]
        wide = raw.use_double_wide_mlp and kv_layer is not None
        return LayerSpec(
            attention,
            ropes_by_type(raw, attention.head_size, THETAS)[kind],
            experts=experts,
            values_are_keys=raw.attention_k_eq_v and kind == FULL and kv_layer is None,
            kv_layer=kv_layer,
            intermediate_size=2 * raw.intermediate_size if wide else None,
        )

    return tuple(layer(index, kind) for index, kind in enumerate(types))


def _parameters(raw: Gemma4Config) -> int:
    """Number of parameters that no other field of a ModelSpec counts."""
    each, of_all, size, hidden = 1, 0, raw.hidden_size_per_layer_input, raw.hidden_size
    if raw.enable_moe_block:
        each += 4 * hidden  # three norms and the router's scale
    if size:
        each += 2 * hidden * size + hidden
        of_all = raw.num_hidden_layers * size * (raw.vocab_size + hidden) + size
    return raw.num_hidden_layers * each + of_all


def _gemma4(architecture: str, raw: Gemma4Config) -> ModelSpec:
    size, rows = raw.hidden_size_per_layer_input, raw.vocab_size_per_layer_input or raw.vocab_size
    if size and rows != raw.vocab_size:
        raise ModelError(f"vocab_size_per_layer_input {rows} is not supported; it must be vocab_size {raw.vocab_size}")
    types = layer_types_of(raw, every_nth(6))
    types[-1] = FULL  # regardless of config.json
    return decoder(
        architecture,
        raw,
        _layers(raw, types),
        NormSpec(raw.rms_norm_eps, "wide rms"),
        raw.intermediate_size,
        activation=activation_of(raw.hidden_activation, "hidden_activation"),
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
        qk_norm="head",
        value_norm=True,
        norms_per_layer=4,
        embedding_scale=raw.hidden_size**0.5,
        logits_soft_cap=raw.final_logit_softcapping or 0.0,
        mlp_beside_experts=raw.enable_moe_block,
        per_layer_size=size,
        extra_parameters=_parameters(raw),
    )


UNIFIED = ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration")
FAMILIES = dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), Family(Gemma4Config, _gemma4))
FAMILIES |= dict.fromkeys(UNIFIED, Family(Gemma4UnifiedConfig, _gemma4))
