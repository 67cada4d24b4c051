"""LFM3: LFM2's short convolutions, sliding and full attention, a norm after each block, and a gate per head."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    Family,
    RawConfig,
    attention_of,
    decoder,
    layer_types_of,
    ropes_by_type,
    typed_layers,
)
from vllm_lite.checkpoint.families.lfm2 import CONV
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size

THETAS = {SLIDING: 1e4, FULL: 1e6}
ROPES: dict[str, Any] = {SLIDING: {}, FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5}}
"""Default rope."""


class Lfm3Config(RawConfig, kw_only=True):
    intermediate_size: Size = 7680
    head_dim: Size | None = 128
    norm_eps: Positive = 1e-5
    conv_L_cache: Annotated[int, Meta(ge=2, le=16)] = 7  # noqa: N815 (the file's)
    conv_bias: Literal[False] = False
    attention_bias: Literal[False] = False
    sliding_window: Size | None = 256
    use_sandwich_norm: Literal[True] = True
    use_attention_gate: bool = True
    tie_word_embeddings: bool = True


def _kind(layer: int) -> str:
    """Default type of a layer: of each four, two have attention, except the first layer."""
    return FULL if layer % 4 == 2 else SLIDING if layer % 4 == 0 and layer else CONV


def _lfm3(architecture: str, raw: Lfm3Config) -> ModelSpec:
    raw.rope_parameters = raw.rope_parameters or ROPES
    attention, types = attention_of(raw), layer_types_of(raw, _kind, (FULL, SLIDING, CONV))
    ropes = ropes_by_type(raw, attention.head_size, THETAS)
    attending = typed_layers(attention, types, raw.sliding_window, ropes)
    conv = LayerSpec(attention, None, recurrent=ShortConvSpec(raw.hidden_size, raw.conv_L_cache))
    gated = raw.use_attention_gate
    layers = tuple(
        conv if kind == CONV else LayerSpec(layer.attention, layer.rope, output_gate="heads" if gated else None)
        for kind, layer in zip(types, attending, strict=True)
    )
    norm = NormSpec(raw.norm_eps)
    return decoder(architecture, raw, layers, norm, raw.intermediate_size, qk_norm="head", norms_per_layer=4)


FAMILIES = {"Lfm3ForCausalLM": Family(Lfm3Config, _lfm3)}
