"""OLMo 2 and 3, and OLMoE: norms on Q and K over all heads together; norms after the blocks, except in OLMoE."""

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    Family,
    RawConfig,
    attention_of,
    decoder,
    every_nth,
    layer_types_of,
    rope_of,
    ropes_by_type,
    typed_layers,
)
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.families.mixture import NumExperts, routing_of, with_experts
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size

OLMO3_THETA = 5e5


class Olmo2Config(RawConfig, kw_only=True):
    intermediate_size: Size
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False


class Olmo3Config(Olmo2Config, kw_only=True):
    sliding_window: Size | None = 4096


class OlmoeConfig(LlamaConfig, kw_only=True):
    num_experts: NumExperts = 64
    num_experts_per_tok: NumExperts = 8
    norm_topk_prob: bool = False
    clip_qkv: Positive | None = None


def _decoder(architecture: str, raw: Olmo2Config, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    return decoder(
        architecture,
        raw,
        layers,
        NormSpec(raw.rms_norm_eps, "wide rms"),
        raw.intermediate_size,
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
        qk_norm="all heads",
    )


def _olmo2(architecture: str, raw: Olmo2Config) -> ModelSpec:
    attention = attention_of(raw)
    layers = typed_layers(attention, layer_types_of(raw), None, rope_of(raw, attention.head_size))
    return _decoder(architecture, raw, layers)


def _olmo3(architecture: str, raw: Olmo3Config) -> ModelSpec:
    """Read an OLMo 3: three sliding layers to one full layer; only the full layers' rope is scaled."""
    attention = attention_of(raw)
    types = layer_types_of(raw, every_nth(4))
    ropes = ropes_by_type(raw, attention.head_size, dict.fromkeys((FULL, SLIDING), raw.rope_theta or OLMO3_THETA))
    return _decoder(architecture, raw, typed_layers(attention, types, raw.sliding_window, ropes))


def _olmoe(architecture: str, raw: OlmoeConfig) -> ModelSpec:
    """Read an OLMoE: Llama's order of norms and blocks, and experts in every layer."""
    routing = routing_of(raw.num_experts, raw.num_experts_per_tok, renormalize=raw.norm_topk_prob)
    layers = with_experts(llama_layers(raw, full_attention(raw)), ExpertsSpec(routing, raw.intermediate_size))
    return llama_like(architecture, raw, layers, qk_norm="all heads", qkv_clip=raw.clip_qkv or 0.0)


FAMILIES = {
    "Olmo2ForCausalLM": Family(Olmo2Config, _olmo2),
    "Olmo3ForCausalLM": Family(Olmo3Config, _olmo3),
    "OlmoeForCausalLM": Family(OlmoeConfig, _olmoe, {"num_local_experts": "num_experts"}),
}
