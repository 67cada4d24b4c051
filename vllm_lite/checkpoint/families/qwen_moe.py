"""Qwen3-MoE: Qwen3 whose layers have experts, all or every so many of them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.experts import ExpertsSpec, RoutingSpec
from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import llama_layers, llama_like
from vllm_lite.checkpoint.families.qwen import QwenConfig, qwen_windows
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.typed_json import Size


class Qwen3MoeConfig(QwenConfig, kw_only=True):
    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: tuple[Annotated[int, Meta(ge=0)], ...] = ()


def _qwen3(architecture: str, raw: Qwen3MoeConfig) -> ModelSpec:
    routing = RoutingSpec(raw.num_experts, raw.num_experts_per_tok, renormalize=raw.norm_topk_prob)
    experts = ExpertsSpec(routing, raw.moe_intermediate_size)

    def made(index: int, layer: LayerSpec) -> LayerSpec:
        sparse = index not in raw.mlp_only_layers and (index + 1) % raw.decoder_sparse_step == 0
        return msgspec.structs.replace(layer, experts=experts) if sparse else layer

    layers = tuple(made(*each) for each in enumerate(llama_layers(raw, qwen_windows(raw))))
    return llama_like(architecture, raw, layers, qk_norm="head")


FAMILIES = {"Qwen3MoeForCausalLM": Family(Qwen3MoeConfig, _qwen3, {"num_local_experts": "num_experts"})}
