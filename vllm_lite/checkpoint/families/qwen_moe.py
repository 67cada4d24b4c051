"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in all layers or at intervals.

For models that also take images (VL), this is the text part, whose files have the experts' matrices transposed.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import FULL, SLIDING, Family, layer_types_of, windows_of
from vllm_lite.checkpoint.families.llama import llama_layers, llama_like
from vllm_lite.checkpoint.families.mixture import Index, NumExperts, at_intervals, routing_of, with_experts
from vllm_lite.checkpoint.families.qwen import QwenConfig, qwen_windows
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Positive, Size


class QwenMoeConfig(QwenConfig, kw_only=True):
    num_experts: NumExperts
    num_experts_per_tok: NumExperts
    moe_intermediate_size: Size
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: tuple[Index, ...] | None = None


class Qwen2MoeConfig(QwenMoeConfig, kw_only=True):
    shared_expert_intermediate_size: Size
    qkv_bias: bool = True
    sliding_window: Annotated[int, Meta(ge=0, le=2**31 - 1)] | msgspec.UnsetType | None = msgspec.UNSET
    """0 means none as well."""


def _decoder(
    architecture: str, raw: QwenMoeConfig, windows: list[int | None], shared: dict[str, Any], **own: Any
) -> ModelSpec:
    """Make a decoder's spec. `shared`: fields of ExpertsSpec for the shared expert."""
    routing = routing_of(raw.num_experts, raw.num_experts_per_tok, renormalize=raw.norm_topk_prob)
    experts = ExpertsSpec(routing, raw.moe_intermediate_size, **shared)
    sparse = at_intervals(raw.decoder_sparse_step, raw.mlp_only_layers)
    return llama_like(architecture, raw, with_experts(llama_layers(raw, windows), experts, sparse), **own)


def _qwen2(architecture: str, raw: Qwen2MoeConfig) -> ModelSpec:
    """Read a Qwen2-MoE. Windows, if any, are on every second of the first layers, unlike Qwen2's."""
    window = raw.sliding_window if raw.use_sliding_window and raw.sliding_window else None
    first = 0 if window is None else raw.max_window_layers
    types = layer_types_of(raw, lambda layer: SLIDING if layer < first and layer % 2 == 0 else FULL)
    shared = {"shared_intermediate_size": raw.shared_expert_intermediate_size, "shared_gate": True}
    return _decoder(
        architecture, raw, windows_of(types, window), shared, qkv_bias=raw.qkv_bias, output_bias=False, mlp_bias=False
    )


def _qwen3(architecture: str, raw: QwenMoeConfig) -> ModelSpec:
    return _decoder(architecture, raw, qwen_windows(raw), {}, qk_norm="head")


class Qwen3VLMoeConfig(QwenMoeConfig, kw_only=True):
    norm_topk_prob: bool = True
    rope_theta: Positive | None = 500_000.0


def _qwen3_vl(architecture: str, raw: Qwen3VLMoeConfig) -> ModelSpec:
    """Read a Qwen3-VL-MoE, whose expert weights are always renormalized, regardless of config.json."""
    raw.norm_topk_prob = True
    return _qwen3(architecture, raw)


FAMILIES = {
    "Qwen2MoeForCausalLM": Family(Qwen2MoeConfig, _qwen2),
    "Qwen3MoeForCausalLM": Family(QwenMoeConfig, _qwen3, {"num_local_experts": "num_experts"}),
    "Qwen3VLMoeForConditionalGeneration": Family(Qwen3VLMoeConfig, _qwen3_vl, {"num_local_experts": "num_experts"}),
}
