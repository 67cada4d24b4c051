"""Muse Glimmer: windows in three of four layers, full layers without rope, and a gate on attention's output.

Q and K are normed without a weight, and Q is then multiplied by a constant, which is folded into the scale of scores.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    Family,
    RawConfig,
    attention_of,
    decoder,
    layer_types_of,
    rope_of,
    windows_of,
)
from vllm_lite.checkpoint.layer_specs.rope import DEFAULT_THETA
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError


class MuseGlimmerConfig(RawConfig, kw_only=True):
    intermediate_size: Size = 19968
    head_dim: Size | None = 128
    rms_norm_eps: Positive = 1e-5
    post_norm_eps: Positive = 1e-8
    attention_bias: Literal[False] = False
    sliding_window: Size | None = 2048
    final_logit_softcapping: Positive = 20.0
    output_multiplier: Positive = 0.19611613513818404
    qk_scale_factor: Positive = 3.87
    layer_rope_theta: list[Annotated[float, Meta(ge=0)]] | None = None


def _is_rotated(raw: MuseGlimmerConfig, theta: float) -> list[bool]:
    """Whether each layer has rope: by the list of thetas, or all but every fourth, counted from the last."""
    count = raw.num_hidden_layers
    thetas = raw.layer_rope_theta
    if thetas is None:
        return [(count - 1 - layer) % 4 != 0 for layer in range(count)]
    if len(thetas) != count:
        raise ModelError(f"layer_rope_theta has {len(thetas)} entries for {count} layers")
    if others := sorted({each for each in thetas if each not in (0, theta)}):
        raise ModelError(f"layer_rope_theta {others[0]} is not supported; each must be 0 or rope_theta, {theta}")
    return [each != 0 for each in thetas]


def _muse(architecture: str, raw: MuseGlimmerConfig) -> ModelSpec:
    heads, count = attention_of(raw), raw.num_hidden_layers
    heads = msgspec.structs.replace(heads, scale=heads.scale * raw.qk_scale_factor)
    rope = rope_of(raw, heads.head_size, theta=DEFAULT_THETA)
    types = layer_types_of(raw, lambda layer: SLIDING if (count - 1 - layer) % 4 else FULL)
    layers = tuple(
        LayerSpec(msgspec.structs.replace(heads, window=window), rope if turns else None, output_gate="elements")
        for window, turns in zip(windows_of(types, raw.sliding_window), _is_rotated(raw, rope.theta), strict=True)
    )
    return decoder(
        architecture,
        raw,
        layers,
        NormSpec(raw.rms_norm_eps, "wide rms", plus_one=True),
        raw.intermediate_size,
        qk_norm="bare head",
        norms_per_layer=4,
        output_norm_eps=raw.post_norm_eps,
        logits_scale=raw.output_multiplier,
        logits_soft_cap=raw.final_logit_softcapping,
    )


FAMILIES = {
    "MuseGlimmerForConditionalGeneration": Family(MuseGlimmerConfig, _muse, {"hidden_activation": "hidden_act"})
}
