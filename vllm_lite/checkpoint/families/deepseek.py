"""DeepSeek V2 and V3, and models that are V3 by another name: latent attention, experts after the first layers."""

from collections.abc import Sequence
from typing import Literal

from vllm_lite.checkpoint.families.common import Family, RawConfig, decoder, rope_of
from vllm_lite.checkpoint.families.mixture import V3_ROUTING, Index, grouped_routing_of
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec, RoutingSpec
from vllm_lite.checkpoint.layer_specs.latent import LatentSpec
from vllm_lite.checkpoint.layer_specs.rope import yarn_magnitude
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, QueryGrowth
from vllm_lite.checkpoint.typed_json import Positive, Size


class DeepseekConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    rms_norm_eps: Positive
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    moe_intermediate_size: Size
    n_routed_experts: Size
    num_experts_per_tok: Size
    routed_scaling_factor: Positive = 1.0
    q_lora_rank: Size | None = None
    n_shared_experts: Index | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    first_k_dense_replace: Index = 0
    attention_bias: Literal[False] = False


class DeepseekV2Config(DeepseekConfig, kw_only=True):
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    norm_topk_prob: Literal[False] = False
    """Implementations of V2 interpret true differently."""
    scoring_func: Literal["softmax"] = "softmax"


class DeepseekV3Config(DeepseekConfig, kw_only=True):
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    rope_interleave: bool = True


def _v2(architecture: str, raw: DeepseekV2Config) -> ModelSpec:
    if raw.topk_method == "greedy":
        raw.n_group = raw.topk_group = None
    return latent_decoder(architecture, raw, grouped_routing_of(raw), interleaved=True)


def read_v3(architecture: str, raw: DeepseekV3Config, sparse: Sequence[bool] | None = None) -> ModelSpec:
    """Read a DeepSeek V3 or a similar model. `sparse` as for `latent_decoder`."""
    routing = grouped_routing_of(raw, **V3_ROUTING)
    return latent_decoder(architecture, raw, routing, interleaved=raw.rope_interleave, sparse=sparse)


def latent_decoder(
    architecture: str,
    raw: DeepseekConfig,
    routing: RoutingSpec,
    *,
    interleaved: bool,
    sparse: Sequence[bool] | None = None,
    growth: QueryGrowth | None = None,
) -> ModelSpec:
    """Make the spec of a decoder with latent attention. `sparse`: for each layer whether it has experts; None = all but
    the first `first_k_dense_replace`."""
    latent = LatentSpec(
        raw.kv_lora_rank, raw.qk_nope_head_dim, raw.qk_rope_head_dim, raw.v_head_dim, query_rank=raw.q_lora_rank
    )
    rope = rope_of(raw, raw.qk_rope_head_dim, interleaved=interleaved)
    attention = AttentionSpec(
        raw.num_attention_heads, 1, latent.cached_size, scale=_scale(raw, latent), value_size=latent.rank
    )
    shared = (raw.n_shared_experts or 0) * raw.moe_intermediate_size
    experts = ExpertsSpec(routing, raw.moe_intermediate_size, shared)
    sparse = sparse or [index >= raw.first_k_dense_replace for index in range(raw.num_hidden_layers)]
    layers = tuple(
        LayerSpec(attention, rope, query_growth=growth, experts=experts if has_experts else None, latent=latent)
        for has_experts in sparse
    )
    return decoder(architecture, raw, layers, NormSpec(raw.rms_norm_eps), raw.intermediate_size)


def _scale(raw: DeepseekConfig, latent: LatentSpec) -> float:
    """Scale of scores: that of a head before absorption, times the square of YaRN's magnitude."""
    values = raw.rope_parameters or raw.rope_scaling or {}
    scale: float = latent.query_size**-0.5
    factor, magnitude = values.get("factor"), values.get("mscale_all_dim")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default" or not magnitude or not factor:
        return scale
    return scale * yarn_magnitude(float(factor), float(magnitude)) ** 2


V3 = Family(DeepseekV3Config, read_v3, {"num_local_experts": "n_routed_experts"})
FAMILIES = {
    "DeepseekV2ForCausalLM": Family(DeepseekV2Config, _v2, {"num_experts": "n_routed_experts"}),
    "DeepseekV3ForCausalLM": V3,
    "KimiK25ForConditionalGeneration": V3,
    "Kimi_K25ForConditionalGeneration": V3,
}
