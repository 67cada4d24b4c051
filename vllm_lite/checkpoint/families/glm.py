"""GLM-4: interleaved rope on half of each head, biases on Q, K and V, gate and up in one tensor."""

from vllm_lite.checkpoint.families.common import (
    Family,
    RawConfig,
    attention_of,
    decoder,
    layer_types_of,
    rope_of,
    typed_layers,
)
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId

NORMS = {"GlmForCausalLM": 2, "Glm4ForCausalLM": 4}
"""Norms per layer; the other tensors of both have equal names."""
EOS = (151329, 151336, 151338)


class GlmConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 128
    rms_norm_eps: Positive = 1.5625e-7
    attention_bias: bool = True
    eos_token_id: TokenId | list[TokenId] | None = None


def _glm(architecture: str, raw: GlmConfig) -> ModelSpec:
    attention = attention_of(raw)
    rope = rope_of(raw, attention.head_size, interleaved=True, partial_rotary_factor=0.5)
    own = {} if raw.eos_token_id is not None else {"eos_token_ids": EOS}
    return decoder(
        architecture,
        raw,
        typed_layers(attention, layer_types_of(raw), None, rope),
        NormSpec(raw.rms_norm_eps),
        raw.intermediate_size,
        qkv_bias=raw.attention_bias,
        norms_per_layer=NORMS[architecture],
        **own,
    )


FAMILIES = {name: Family(GlmConfig, _glm) for name in NORMS}
