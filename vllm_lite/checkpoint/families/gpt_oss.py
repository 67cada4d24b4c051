"""gpt-oss: every second layer is sliding, heads have sinks, all layers have experts with biases, mostly in MXFP4."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from vllm_lite.checkpoint.families.common import (
    Family,
    RawConfig,
    attention_of,
    decoder,
    every_nth,
    layer_types_of,
    layers_of,
    rope_of,
    windows_of,
)
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

THETA = 150_000.0
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Default rope."""
SLOPE, LIMIT = 1.702, 7.0
"""Constants of the activation, which its kernels have built in."""


class GptOssConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    num_local_experts: NumExperts
    num_experts_per_tok: NumExperts = 4
    head_dim: Size | None = 64
    rms_norm_eps: Positive = 1e-5
    sliding_window: Size | None = 128
    attention_bias: bool = True
    swiglu_alpha: float = SLOPE
    swiglu_limit: float = LIMIT


def oss_layers(
    raw: GptOssConfig, windows: Callable[[GptOssConfig], Sequence[int | None]], *, interleaved: bool = False
) -> tuple[LayerSpec, ...]:
    """Layers with sinks, experts and the family's default YaRN. `interleaved`: rope rotates adjacent elements."""
    if (raw.swiglu_alpha, raw.swiglu_limit) != (SLOPE, LIMIT):
        raise ModelError(
            f"swiglu_alpha {raw.swiglu_alpha} with swiglu_limit {raw.swiglu_limit} is not supported; supported: "
            f"{SLOPE} with {LIMIT}"
        )
    if raw.rope_parameters is None and raw.rope_scaling is None:
        raw = replace(raw, rope_scaling=YARN)
    attention = replace(attention_of(raw), sinks=True)
    rope, own = rope_of(raw, attention.head_size, theta=THETA, interleaved=interleaved), windows(raw)
    routing = routing_of(raw.num_local_experts, raw.num_experts_per_tok, renormalize=True)
    experts = ExpertsSpec(routing, raw.intermediate_size, biases=True, stored="fused")
    return with_experts(layers_of(attention, own, [rope] * len(own)), experts)


def _every_second(raw: GptOssConfig) -> list[int | None]:
    return windows_of(layer_types_of(raw, every_nth(2)), raw.sliding_window)


def _gpt_oss(architecture: str, raw: GptOssConfig) -> ModelSpec:
    layers = oss_layers(raw, _every_second)
    biases = {"qkv_bias": raw.attention_bias, "output_bias": raw.attention_bias}
    norm = NormSpec(raw.rms_norm_eps, "wide rms")
    return decoder(architecture, raw, layers, norm, raw.intermediate_size, activation="swiglu_oai", **biases)


FAMILIES = {"GptOssForCausalLM": Family(GptOssConfig, _gpt_oss, {"num_experts": "num_local_experts"})}
