"""ERNIE 4.5: Llama with interleaved rope and one switch for all biases; with or without experts."""

from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.families.mixture import Index, NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.typed_json import Positive, Size

WithExperts = Callable[[tuple[LayerSpec, ...]], tuple[LayerSpec, ...]]


class ErnieConfig(LlamaConfig, kw_only=True):
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 128
    tie_word_embeddings: bool = True
    use_bias: bool | None = False


class ErnieMoeConfig(ErnieConfig, kw_only=True):
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = None
    use_bias: Literal[False] | None = False
    moe_num_experts: NumExperts = 64
    moe_k: NumExperts = 6
    moe_intermediate_size: Size = 1536
    moe_num_shared_experts: Annotated[int, Meta(ge=0, le=16384)] = 2
    moe_layer_start_index: Index = 1
    moe_layer_end_index: Annotated[int, Meta(ge=-1)] = -1
    """The last layer with experts; -1 = the last layer."""
    moe_layer_interval: Size = 1
    moe_norm_min: Positive = 1e-12


def _ernie(architecture: str, raw: ErnieConfig, experts: WithExperts | None = None) -> ModelSpec:
    raw.attention_bias = raw.mlp_bias = bool(raw.use_bias)
    layers = llama_layers(raw, full_attention(raw), theta=500000.0, interleaved=True)
    return llama_like(architecture, raw, layers if experts is None else experts(layers))


def _ernie_moe(architecture: str, raw: ErnieMoeConfig) -> ModelSpec:
    """Read an ERNIE with experts. transformers divides by max(sum, moe_norm_min); here moe_norm_min is added to the
    sum, which is equivalent as sums are far larger."""
    routing = routing_of(raw.moe_num_experts, raw.moe_k, renormalize=True, epsilon=raw.moe_norm_min, choice_bias=True)
    experts = ExpertsSpec(routing, raw.moe_intermediate_size, raw.moe_num_shared_experts * raw.moe_intermediate_size)
    end = raw.num_hidden_layers - 1 if raw.moe_layer_end_index == -1 else raw.moe_layer_end_index

    def sparse(index: int) -> bool:
        return raw.moe_layer_start_index <= index <= end and (index + 1) % raw.moe_layer_interval == 0

    return _ernie(architecture, raw, lambda layers: with_experts(layers, experts, sparse))


FAMILIES = {
    "Ernie4_5ForCausalLM": Family(ErnieConfig, _ernie),
    "Ernie4_5_MoeForCausalLM": Family(
        ErnieMoeConfig, _ernie_moe, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    ),
}
