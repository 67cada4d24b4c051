"""BLOOM, Falcon and GPT-NeoX (Pythia): Q, K and V in one tensor, LayerNorms with biases, MLPs without a gate."""

import struct
from typing import Literal

import msgspec

from vllm_lite.checkpoint.families.common import (
    Family,
    OlderConfig,
    RawConfig,
    attention_of,
    decoder,
    equal_layers,
    rope_of,
)
from vllm_lite.checkpoint.model_spec import AttentionSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId

NEOX_PARTIAL_ROTARY_FACTOR = 0.25


class BloomConfig(OlderConfig, kw_only=True):
    max_position_embeddings: Size = 2048
    """Length of the training sequences, which checkpoints call seq_length; ALiBi itself has no limit."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    apply_residual_connection_post_layernorm: Literal[False] = False


class FalconConfig(OlderConfig, kw_only=True):
    max_position_embeddings: Size = 2048
    ffn_hidden_size: Size | None = None
    hidden_act: str = "gelu"
    bos_token_id: TokenId | None = 11
    eos_token_id: TokenId | list[TokenId] | None = 11
    alibi: bool = False
    bias: bool = False
    multi_query: bool = True
    new_decoder_architecture: bool = False
    parallel_attn: bool = True
    num_ln_in_parallel_attn: Literal[1, 2] | None = None


class GPTNeoXConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    max_position_embeddings: Size = 2048
    hidden_act: str = "gelu"
    layer_norm_eps: Positive = 1e-5
    attention_bias: bool = True
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 2
    use_parallel_residual: bool = True


def _with_alibi(attention: AttentionSpec, factor: float = 1.0) -> AttentionSpec:
    slopes = tuple(factor * slope for slope in alibi_slopes(attention.num_heads))
    return msgspec.structs.replace(attention, alibi_slopes=slopes)


def _bloom(architecture: str, raw: BloomConfig) -> ModelSpec:
    return decoder(
        architecture,
        raw,
        equal_layers(raw, _with_alibi(attention_of(raw))),
        NormSpec(raw.layer_norm_epsilon, "layer", bias=True),
        4 * raw.hidden_size,
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        extra_parameters=2 * raw.hidden_size,  # parameters of the norm on token embeddings
    )


def _falcon(architecture: str, raw: FalconConfig) -> ModelSpec:
    """Read a Falcon, which adds ALiBi before scores are scaled."""
    newer = raw.new_decoder_architecture
    if not newer:
        raw.num_key_value_heads = 1 if raw.multi_query else None
    attention = attention_of(raw)
    rope = None if raw.alibi else rope_of(raw, attention.head_size)
    if raw.alibi:
        attention = _with_alibi(attention, attention.scale)
    parallel = newer or raw.parallel_attn
    one_norm = parallel and not (newer and raw.num_ln_in_parallel_attn != 1)
    return decoder(
        architecture,
        raw,
        equal_layers(raw, attention, rope),
        NormSpec(raw.layer_norm_epsilon, "layer", bias=True),
        raw.ffn_hidden_size or 4 * raw.hidden_size,
        gated_mlp=False,
        qkv_bias=raw.bias,
        output_bias=raw.bias,
        mlp_bias=raw.bias,
        parallel_blocks=parallel,
        norms_per_layer=1 if one_norm else 2,
    )


def _neox(architecture: str, raw: GPTNeoXConfig) -> ModelSpec:
    attention = attention_of(raw)
    rope = rope_of(raw, attention.head_size, partial_rotary_factor=NEOX_PARTIAL_ROTARY_FACTOR)
    return decoder(
        architecture,
        raw,
        equal_layers(raw, attention, rope),
        NormSpec(raw.layer_norm_eps, "layer", bias=True),
        raw.intermediate_size,
        gated_mlp=False,
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
        mlp_bias=True,
        parallel_blocks=raw.use_parallel_residual,
    )


FAMILIES = {
    "BloomForCausalLM": Family(
        BloomConfig,
        _bloom,
        {
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "seq_length": "max_position_embeddings",
        },
    ),
    "FalconForCausalLM": Family(
        FalconConfig,
        _falcon,
        {
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_key_value_heads",
            "num_kv_heads": "num_key_value_heads",
            "activation": "hidden_act",
        },
    ),
    "GPTNeoXForCausalLM": Family(
        GPTNeoXConfig, _neox, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    ),
}


# ---- ALiBi's slopes, by which scores fall with the distance of a key (Press et al. 2022); checkpoints do not store
# them.


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head, as in transformers' BLOOM, for any number of heads.

    For a power of two, n, the slopes are b, b^2, ..., b^n with b = 2^(-8/n). Further heads take the odd powers of the
    base for twice as many. Bases are rounded to float32 first, as in training: after 128 powers the difference shows.
    Raises ValueError for no heads.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    even = 1 << (num_heads.bit_length() - 1)
    base, further = _base(even), _base(2 * even)
    more = (further**power for power in range(1, 2 * (num_heads - even), 2))
    return (*(base**power for power in range(1, even + 1)), *more)


def _base(num_heads: int) -> float:
    """2^(-8 / num_heads) in float32."""
    return float(struct.unpack("<f", struct.pack("<f", 2.0 ** (-8 / num_heads)))[0])
