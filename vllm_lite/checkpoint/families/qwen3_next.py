"""Qwen3-Next: Qwen3.5's layers with experts; recurrent layers have their projections in two tensors, ordered by key
head."""

from msgspec.structs import replace

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.mixture import Index, at_intervals, with_experts
from vllm_lite.checkpoint.families.qwen3_5 import Qwen35MoeConfig, experts_of, hybrid_decoder, hybrid_layers
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Size


class Qwen3NextConfig(Qwen35MoeConfig, kw_only=True):
    intermediate_size: Size = 5632
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    mlp_only_layers: tuple[Index, ...] | None = None


def _qwen3_next(architecture: str, raw: Qwen3NextConfig) -> ModelSpec:
    experts = experts_of(raw, renormalize=raw.norm_topk_prob)
    sparse = at_intervals(raw.decoder_sparse_step, raw.mlp_only_layers)
    hybrid = (
        replace(own, recurrent=replace(own.recurrent, stored="by key head"))
        if isinstance(own.recurrent, DeltaNetSpec)
        else own
        for own in hybrid_layers(raw)
    )
    layers = with_experts(tuple(hybrid), experts, sparse)
    # If no layer has a dense MLP, its size must only be divisible among ranks.
    inner = raw.moe_intermediate_size if all(own.experts for own in layers) else raw.intermediate_size
    return hybrid_decoder(architecture, raw, layers, inner)


FAMILIES = {"Qwen3NextForCausalLM": Family(Qwen3NextConfig, _qwen3_next)}
