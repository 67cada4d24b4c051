"""Gemma 1, 2 and 3: norm weights stored as differences from 1, token embeddings times sqrt(hidden_size)."""

from typing import Any, Literal

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
    rope_of,
    ropes_by_type,
    typed_layers,
)
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId

TANH = "gelu_pytorch_tanh"
SLIDING_THETA, FULL_THETA = 1e4, 1e6
"""Default thetas of Gemma 3."""


class GemmaConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    head_dim: Size | None = 256
    hidden_act: str = TANH
    rms_norm_eps: Positive = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    use_bidirectional_attention: Literal[False] | None = None


class Gemma2Config(GemmaConfig, kw_only=True):
    num_key_value_heads: Size | None = 4
    hidden_activation: str = TANH
    query_pre_attn_scalar: Positive = 256
    sliding_window: Size | None = 4096
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


class Gemma3Config(Gemma2Config, kw_only=True):
    """Keys of Gemma 3, with the defaults that the text part of a larger model leaves out."""

    vocab_size: Size = 262_208
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Size = 26
    num_attention_heads: Size = 8
    max_position_embeddings: Size = 131_072
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[TokenId] | None = 1
    final_logit_softcapping: Positive | None = None
    rope_local_base_freq: Positive | None = None
    sliding_window_pattern: Size = 6


def _decoder(architecture: str, raw: GemmaConfig, layers: tuple[LayerSpec, ...], **own: Any) -> ModelSpec:
    norm = NormSpec(raw.rms_norm_eps, "wide rms", plus_one=True)
    biases = {"qkv_bias": raw.attention_bias, "output_bias": raw.attention_bias}
    scale = raw.hidden_size**0.5
    return decoder(architecture, raw, layers, norm, raw.intermediate_size, embedding_scale=scale, **(biases | own))


def _gemma(architecture: str, raw: GemmaConfig) -> ModelSpec:
    """Read a Gemma 1, whose first release says gelu and means its tanh approximation."""
    attention = attention_of(raw)
    layers = typed_layers(attention, layer_types_of(raw), None, rope_of(raw, attention.head_size))
    return _decoder(
        architecture, raw, layers, activation=activation_of(TANH if raw.hidden_act == "gelu" else raw.hidden_act)
    )


def _scaled(raw: Gemma2Config, soft_cap: float | None) -> AttentionSpec:
    return replace(attention_of(raw), scale=raw.query_pre_attn_scalar**-0.5, soft_cap=soft_cap or 0.0)


def _own(raw: Gemma2Config) -> dict[str, Any]:
    """Fields of Gemma 2 and 3 that Gemma 1 lacks."""
    activation = activation_of(raw.hidden_activation, "hidden_activation")
    cap = raw.final_logit_softcapping or 0.0
    return {"activation": activation, "logits_soft_cap": cap, "norms_per_layer": 4}


def _gemma2(architecture: str, raw: Gemma2Config) -> ModelSpec:
    attention = _scaled(raw, raw.attn_logit_softcapping)
    types = layer_types_of(raw, every_nth(2))
    layers = typed_layers(attention, types, raw.sliding_window, rope_of(raw, attention.head_size))
    return _decoder(architecture, raw, layers, **_own(raw))


def _gemma3(architecture: str, raw: Gemma3Config) -> ModelSpec:
    """Read a Gemma 3. Its key for a soft cap of attention is ignored, as in transformers."""
    attention = _scaled(raw, None)
    types = layer_types_of(raw, every_nth(raw.sliding_window_pattern))
    thetas = {FULL: raw.rope_theta or FULL_THETA, SLIDING: raw.rope_local_base_freq or SLIDING_THETA}
    ropes = ropes_by_type(raw, attention.head_size, thetas)
    layers = typed_layers(attention, types, raw.sliding_window, ropes)
    return _decoder(architecture, raw, layers, qk_norm="head", **_own(raw))


FAMILIES = {
    "GemmaForCausalLM": Family(GemmaConfig, _gemma),
    "Gemma2ForCausalLM": Family(Gemma2Config, _gemma2),
    "Gemma3ForCausalLM": Family(Gemma3Config, _gemma3),
    "Gemma3ForConditionalGeneration": Family(Gemma3Config, _gemma3),
}
