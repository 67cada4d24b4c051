"""Granite 3: Llama with four factors, on token vectors, scores, what blocks give, and logits; with experts or not."""

from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.experts import ExpertsSpec
from vllm_lite.checkpoint.families.common import Family, attention_of, layers_of, rope_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_like
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive


class GraniteConfig(LlamaConfig, kw_only=True):
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    """The scale of scores itself, not a factor on the usual one."""
    logits_scaling: Positive = 1.0
    """Logits are divided by it."""


class GraniteMoeConfig(GraniteConfig, kw_only=True):
    num_local_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2
    shared_intermediate_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


def _granite(architecture: str, raw: GraniteConfig, experts: ExpertsSpec | None = None) -> ModelSpec:
    attention = msgspec.structs.replace(attention_of(raw), scale=raw.attention_multiplier)
    windows = full_attention(raw)
    layers = layers_of(attention, windows, [rope_of(raw, attention.head_size)] * len(windows))
    return llama_like(
        architecture,
        raw,
        layers if experts is None else with_experts(layers, experts),
        embedding_scale=raw.embedding_multiplier,
        residual_scale=raw.residual_multiplier,
        logits_scale=1 / raw.logits_scaling,
    )


def _granite_moe(architecture: str, raw: GraniteMoeConfig) -> ModelSpec:
    """A softmax over the logits of the chosen is that over all of them, divided by what the chosen have of it."""
    routing = routing_of(raw.num_local_experts, raw.num_experts_per_tok, renormalize=True)
    shared = raw.shared_intermediate_size if architecture == "GraniteMoeSharedForCausalLM" else 0
    return _granite(architecture, raw, ExpertsSpec(routing, raw.intermediate_size, shared, stored="fused"))


FAMILIES = {
    "GraniteForCausalLM": Family(GraniteConfig, _granite),
    "GraniteMoeForCausalLM": Family(GraniteMoeConfig, _granite_moe),
    "GraniteMoeSharedForCausalLM": Family(GraniteMoeConfig, _granite_moe),
}
