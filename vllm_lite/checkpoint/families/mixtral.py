"""Mixtral: Mistral with experts in all layers."""

from vllm_lite.checkpoint.families.common import Family, layer_types_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import ModelSpec


class MixtralConfig(LlamaConfig, kw_only=True):
    num_local_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2


def _mixtral(architecture: str, raw: MixtralConfig) -> ModelSpec:
    layer_types_of(raw)
    routing = routing_of(raw.num_local_experts, raw.num_experts_per_tok, renormalize=True)
    layers = llama_layers(raw, [window_of(raw, default=None)] * raw.num_hidden_layers)
    return llama_like(architecture, raw, with_experts(layers, ExpertsSpec(routing, raw.intermediate_size)))


FAMILIES = {"MixtralForCausalLM": Family(MixtralConfig, _mixtral, {"num_experts": "num_local_experts"})}
