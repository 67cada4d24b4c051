"""Cohere 2 (Command R7B and A): parallel attention and MLP after one LayerNorm without a bias."""

from vllm_lite.checkpoint.families.common import (
    SLIDING,
    Family,
    RawConfig,
    attention_of,
    decoder,
    every_nth,
    layer_types_of,
    rope_of,
    typed_layers,
)
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size


class Cohere2Config(RawConfig, kw_only=True):
    intermediate_size: Size
    layer_norm_eps: Positive = 1e-5
    logit_scale: Positive = 0.0625
    attention_bias: bool = False
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 4
    tie_word_embeddings: bool = True


def _cohere2(architecture: str, raw: Cohere2Config) -> ModelSpec:
    """Read a Cohere 2: sliding layers have interleaved rope, full layers have no positions."""
    attention = attention_of(raw)
    types = layer_types_of(raw, every_nth(raw.sliding_window_pattern))
    rope = rope_of(raw, attention.head_size, interleaved=True)
    return decoder(
        architecture,
        raw,
        typed_layers(attention, types, raw.sliding_window, {SLIDING: rope}),
        NormSpec(raw.layer_norm_eps, "layer"),
        raw.intermediate_size,
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
        norms_per_layer=1,
        logits_scale=raw.logit_scale,
    )


FAMILIES = {"Cohere2ForCausalLM": Family(Cohere2Config, _cohere2)}
