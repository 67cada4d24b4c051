"""Granite with sliding windows: windows on most layers, sinks in all, and a theta per layer, 0 for no rope."""

from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    Family,
    attention_of,
    layer_types_of,
    layers_of,
    rope_of,
    windows_of,
)
from vllm_lite.checkpoint.families.granite import GraniteConfig, scaled
from vllm_lite.checkpoint.families.llama import window_of
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive
from vllm_lite.errors import ModelError

WINDOW = 128
"""Default window."""


class GraniteSWAConfig(GraniteConfig, kw_only=True):
    rms_norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = True
    layer_rope_theta: list[Annotated[float, Meta(ge=0)]] | None = None


def _ropes(raw: GraniteSWAConfig, head_size: int) -> list[Rope | None]:
    rope, thetas = rope_of(raw, head_size), raw.layer_rope_theta
    if thetas is None:
        return [rope] * raw.num_hidden_layers
    if len(thetas) != raw.num_hidden_layers:
        raise ModelError(f"layer_rope_theta has {len(thetas)} entries for {raw.num_hidden_layers} layers")
    return [msgspec.structs.replace(rope, theta=theta) if theta else None for theta in thetas]


def _granite_swa(architecture: str, raw: GraniteSWAConfig) -> ModelSpec:
    attention = msgspec.structs.replace(attention_of(raw), scale=raw.attention_multiplier, sinks=True)
    types = layer_types_of(raw, lambda layer: SLIDING if layer % 4 else FULL)
    ropes, windows = _ropes(raw, attention.head_size), windows_of(types, window_of(raw, default=WINDOW))
    return scaled(architecture, raw, layers_of(attention, windows, ropes))


FAMILIES = {"GraniteSWAForCausalLM": Family(GraniteSWAConfig, _granite_swa)}
