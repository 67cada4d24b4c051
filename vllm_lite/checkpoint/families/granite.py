"""Granite 3: Llama with four factors, on token vectors, scores, what blocks give, and logits."""

import msgspec

from vllm_lite.checkpoint.families.common import Family, attention_of, layers_of, rope_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_like
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive


class GraniteConfig(LlamaConfig, kw_only=True):
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    """The scale of scores itself, not a factor on the usual one."""
    logits_scaling: Positive = 1.0
    """Logits are divided by it."""


def _granite(architecture: str, raw: GraniteConfig) -> ModelSpec:
    attention = msgspec.structs.replace(attention_of(raw), scale=raw.attention_multiplier)
    windows = full_attention(raw)
    layers = layers_of(attention, windows, [rope_of(raw, attention.head_size)] * len(windows))
    return llama_like(
        architecture,
        raw,
        layers,
        embedding_scale=raw.embedding_multiplier,
        residual_scale=raw.residual_multiplier,
        logits_scale=1 / raw.logits_scaling,
    )


FAMILIES = {"GraniteForCausalLM": Family(GraniteConfig, _granite)}
