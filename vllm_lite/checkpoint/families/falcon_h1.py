"""Falcon-H1: attention and Mamba-2 in parallel in each layer, and multipliers on many parts.

Multipliers on K and on attention's input are folded into the scale of scores and the factor on attention's output.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import Family, RawConfig, attention_of, decoder, rope_of
from vllm_lite.checkpoint.families.state_space import ConvSize, Limits, step_limits
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

Factors = Annotated[list[Positive], Meta(min_length=5, max_length=5)]


class FalconH1Config(RawConfig, kw_only=True):
    intermediate_size: Size = 14336
    rms_norm_eps: Positive = 1e-5
    mamba_d_ssm: Size | None = 1024
    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: ConvSize = 4
    mamba_expand: Size = 2
    mamba_conv_bias: Literal[True] = True
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    time_step_limit: Limits = None
    attention_bias: Literal[False] = False
    projectors_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    mamba_proj_bias: Literal[False] = False
    lm_head_multiplier: Positive = 1.0
    embedding_multiplier: Positive = 1.0
    mlp_multipliers: Annotated[list[Positive], Meta(min_length=2, max_length=2)] | None = None
    key_multiplier: Positive = 1.0
    attention_in_multiplier: Positive = 1.0
    attention_out_multiplier: Positive = 1.0
    ssm_multipliers: Factors | None = None
    ssm_in_multiplier: Positive = 1.0
    ssm_out_multiplier: Positive = 1.0


def _mamba(raw: FalconH1Config) -> MambaSpec:
    inner = raw.mamba_d_ssm or raw.mamba_expand * raw.hidden_size
    size = inner // raw.mamba_n_heads if raw.mamba_d_head == "auto" else raw.mamba_d_head
    if size * raw.mamba_n_heads != inner:
        raise ModelError(f"mamba_n_heads {raw.mamba_n_heads} of {size} elements are not mamba_d_ssm {inner}")
    if raw.mamba_n_heads % raw.mamba_n_groups:
        raise ModelError(f"mamba_n_groups {raw.mamba_n_groups} does not divide mamba_n_heads {raw.mamba_n_heads}")
    if raw.mamba_rms_norm and raw.mamba_norm_before_gate:
        raise ModelError("mamba_norm_before_gate true is not supported with mamba_rms_norm; it must be false")
    gate, x, b, c, steps = (raw.ssm_in_multiplier * each for each in raw.ssm_multipliers or [1.0] * 5)
    return MambaSpec(
        raw.mamba_n_heads,
        size,
        raw.mamba_d_state,
        raw.mamba_d_conv,
        step_limits(raw.time_step_limit),
        raw.mamba_n_groups,
        normed=raw.mamba_rms_norm,
        factors=(gate, x, b, c, steps),
        output_factor=raw.ssm_out_multiplier,
        beside_attention=True,
    )


def _falcon(architecture: str, raw: FalconH1Config) -> ModelSpec:
    attention, read = attention_of(raw), raw.attention_in_multiplier
    attention = msgspec.structs.replace(attention, scale=attention.scale * raw.key_multiplier * read * read)
    layer = LayerSpec(attention, rope_of(raw, attention.head_size), recurrent=_mamba(raw))
    gate, down = raw.mlp_multipliers or (1.0, 1.0)
    return decoder(
        architecture,
        raw,
        (layer,) * raw.num_hidden_layers,
        NormSpec(raw.rms_norm_eps),
        raw.intermediate_size,
        embedding_scale=raw.embedding_multiplier,
        attention_scale=read * raw.attention_out_multiplier,
        gate_scale=gate,
        residual_scale=down,
        logits_scale=raw.lm_head_multiplier,
    )


FAMILIES = {"FalconH1ForCausalLM": Family(FalconH1Config, _falcon)}
