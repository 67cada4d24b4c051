"""Checkpoints of the families whose layers have experts."""

from collections.abc import Callable
from typing import Any

import msgspec

from tests.families.llama_like import SIX_HEADS
from tests.families.variant import Control, Variant, drop_in_layers, without_window
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


def qwen2(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "num_hidden_layers": 3}
    shared = {"shared_expert_intermediate_size": 26}
    return Variant(name, "Qwen2MoeConfig", "Qwen2MoeForCausalLM", SIX_HEADS | own | shared | settings, controls)


def mixtral(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22}
    return Variant(name, "MixtralConfig", "MixtralForCausalLM", SIX_HEADS | own | settings, controls)


RENORMALIZED = {"sum": routing(renormalize=False)}


VARIANTS = [
    qwen3("qwen3-moe", {"one expert": routing(experts_per_token=1)}, mlp_only_layers=[1]),
    qwen3("qwen3-moe-renormalized", RENORMALIZED, norm_topk_prob=True, decoder_sparse_step=2),
    qwen2("qwen2-moe", {"no sum": routing(renormalize=True)}),
    qwen2(
        "qwen2-moe-window",
        RENORMALIZED | {"window": drop_in_layers(without_window)},
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=31,
        num_experts=6,
        num_experts_per_tok=1,
    ),
    mixtral("mixtral", RENORMALIZED, sliding_window=None),
    mixtral("mixtral-one-expert", {"window": drop_in_layers(without_window)}, num_experts_per_tok=1, sliding_window=31),
]
