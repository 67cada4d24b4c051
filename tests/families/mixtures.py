"""Checkpoints of the families whose layers have experts."""

from collections.abc import Callable
from typing import Any

import msgspec

from tests.families.llama_like import SIX_HEADS
from tests.families.variant import Control, Variant, drop_in_layers
from vllm_lite.checkpoint.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec


def in_experts(change: Callable[[ExpertsSpec], ExpertsSpec]) -> Control:
    """The model with the experts of every layer changed."""

    def changed(layer: LayerSpec) -> LayerSpec:
        return layer if layer.experts is None else msgspec.structs.replace(layer, experts=change(layer.experts))

    return drop_in_layers(changed)


def routing(**fields: Any) -> Control:
    """The model with these fields of RoutingSpec instead of its own."""

    def changed(spec: ExpertsSpec) -> ExpertsSpec:
        return msgspec.structs.replace(spec, routing=msgspec.structs.replace(spec.routing, **fields))

    return in_experts(changed)


def qwen3(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_hidden_layers": 3}
    return Variant(name, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", SIX_HEADS | own | settings, controls)


VARIANTS = [
    qwen3("qwen3-moe", {"one expert": routing(experts_per_token=1)}, mlp_only_layers=[1]),
    qwen3("qwen3-moe-renormalized", {"sum": routing(renormalize=False)}, norm_topk_prob=True, decoder_sparse_step=2),
]
