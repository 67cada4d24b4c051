"""ModernBERT: rope, gated MLPs, norms before the blocks, and layers with two-sided windows."""

import msgspec

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    EncoderParts,
    Family,
    RawConfig,
    attention_of,
    encoder,
    layer_types_of,
    ropes_by_type,
    typed_layers,
)
from vllm_lite.checkpoint.layer_specs.pooling import HeadSpec, Kind
from vllm_lite.checkpoint.model_spec import EncoderSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size


class ModernBertConfig(RawConfig, kw_only=True):
    intermediate_size: Size = 1152
    hidden_act: str = "gelu"
    norm_eps: Positive = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: Size = 128
    global_attn_every_n_layers: Size = 3
    global_rope_theta: Positive = 160_000.0
    local_rope_theta: Positive | None = 10_000.0
    classifier_pooling: Kind = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"


def _modernbert(architecture: str, raw: ModernBertConfig) -> ModelSpec:
    attention = attention_of(raw)
    every = raw.global_attn_every_n_layers
    types = layer_types_of(raw, lambda layer: SLIDING if layer % every else FULL)
    local_theta = raw.local_rope_theta or raw.global_rope_theta
    ropes = ropes_by_type(raw, attention.head_size, {FULL: raw.global_rope_theta, SLIDING: local_theta})
    head = HeadSpec(
        output="classifier",
        output_bias=True,
        dense="head.dense",
        dense_bias=raw.classifier_bias,
        activation="gelu",
        norm="head.norm",
    )
    return encoder(
        architecture,
        raw,
        typed_layers(attention, types, raw.local_attention // 2 + 1, ropes),
        NormSpec(raw.norm_eps, "layer", bias=raw.norm_bias),
        EncoderParts(EncoderSpec(), raw.intermediate_size, head, raw.classifier_pooling, head),
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
    )


def _by_type(architecture: str, raw: ModernBertConfig) -> ModelSpec:
    """Read a ModernBERT; thetas by layer type in rope_parameters override the two keys of older files."""
    nested = raw.rope_parameters or {}
    thetas = {
        key: own["rope_theta"]
        for key, kind in (("global_rope_theta", FULL), ("local_rope_theta", SLIDING))
        if isinstance(own := nested.get(kind), dict) and "rope_theta" in own
    }
    return _modernbert(architecture, msgspec.structs.replace(raw, **thetas))


FAMILIES = {
    f"ModernBert{ending}": Family(ModernBertConfig, _by_type, {"hidden_activation": "hidden_act"})
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
}
