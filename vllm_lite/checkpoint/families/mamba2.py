"""Mamba-2: every layer has a recurrent state and none has attention, so there is no KV cache."""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_lite.checkpoint.families.common import Family, RawConfig, decoder
from vllm_lite.checkpoint.families.state_space import ConvSize, Limits, step_limits
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

LONGEST = 131_072
"""Default maximum length of requests: the model has no limit, so config.json has none."""


class Mamba2Config(RawConfig, kw_only=True):
    max_position_embeddings: Size = LONGEST
    head_dim: Size | None = 64
    state_size: Size = 128
    expand: Size = 2
    n_groups: Size = 8
    conv_kernel: ConvSize = 4
    layer_norm_epsilon: Positive = 1e-5
    hidden_act: Literal["silu"] = "silu"
    use_bias: Literal[False] = False
    use_conv_bias: Literal[True] = True
    rms_norm: Literal[True] = True
    norm_before_gate: Literal[False] = False
    time_step_limit: Limits = None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)] = 64


def _mamba2(architecture: str, raw: Mamba2Config) -> ModelSpec:
    if raw.n_groups != 1:
        raise ModelError(
            f"n_groups {raw.n_groups} is not supported; it must be 1: implementations norm different groups"
        )
    heads, size = raw.num_attention_heads, raw.head_dim or 64
    if heads * size != raw.expand * raw.hidden_size:
        raise ModelError(f"{heads} num_heads of {size} are not expand * hidden_size {raw.expand * raw.hidden_size}")
    mamba = MambaSpec(heads, size, raw.state_size, raw.conv_kernel, step_limits(raw.time_step_limit))
    layer = LayerSpec(AttentionSpec(heads, heads, size, scale=1.0), None, recurrent=mamba, only="attention")
    # No layer has an MLP; its size must only be divisible among ranks.
    layers, norm = (layer,) * raw.num_hidden_layers, NormSpec(raw.layer_norm_epsilon)
    return decoder(architecture, raw, layers, norm, heads, norms_per_layer=1)


FAMILIES = {"Mamba2ForCausalLM": Family(Mamba2Config, _mamba2, {"num_heads": "num_attention_heads"})}
