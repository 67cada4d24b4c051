"""GLM-4.5 and 4.6: Llama with rope on half of each head, and sigmoid routing with a learned bias."""

from typing import Annotated

from msgspec import Meta

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.families.mixture import V3_ROUTING, Index, NumExperts, grouped_routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive, Size


class Glm4MoeConfig(LlamaConfig, kw_only=True):
    n_routed_experts: NumExperts
    num_experts_per_tok: NumExperts
    moe_intermediate_size: Size
    n_shared_experts: Annotated[int, Meta(ge=0, le=16384)] = 1
    routed_scaling_factor: Positive = 1.0
    n_group: NumExperts = 1
    topk_group: NumExperts = 1
    first_k_dense_replace: Index = 1
    norm_topk_prob: bool = True
    use_qk_norm: bool = False
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=100)] = 1


def _glm_moe(architecture: str, raw: Glm4MoeConfig) -> ModelSpec:
    routing = grouped_routing_of(raw, **V3_ROUTING)
    experts = ExpertsSpec(routing, raw.moe_intermediate_size, raw.n_shared_experts * raw.moe_intermediate_size)
    layers = llama_layers(raw, full_attention(raw), partial_rotary_factor=0.5)
    return llama_like(
        architecture,
        raw,
        with_experts(layers, experts, lambda index: index >= raw.first_k_dense_replace),
        output_bias=False,
        qk_norm="head" if raw.use_qk_norm else None,
        num_unread_layers=raw.num_nextn_predict_layers,
    )


FAMILIES = {
    "Glm4MoeForCausalLM": Family(
        Glm4MoeConfig,
        _glm_moe,
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    )
}
