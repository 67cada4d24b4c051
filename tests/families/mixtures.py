"""Checkpoints of families with experts."""

from collections.abc import Callable
from typing import Any

import msgspec

from tests.families.llama_like import SIX_HEADS, qwen_vl
from tests.families.variant import Control, Variant, drop, drop_in_layers, without_rope_scaling, without_window
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
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


def olmoe(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22, "head_dim": 16}
    return Variant(name, "OlmoeConfig", "OlmoeForCausalLM", SIX_HEADS | own | settings, controls)


def granite(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    kind = "GraniteMoeShared" if "shared_intermediate_size" in settings else "GraniteMoe"
    own = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22} | MULTIPLIERS
    return Variant(name, f"{kind}Config", f"{kind}ForCausalLM", SIX_HEADS | own | settings, controls)


def glm(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "num_hidden_layers": 3}
    return Variant(name, "Glm4MoeConfig", "Glm4MoeForCausalLM", SIX_HEADS | own | settings, controls)


def gpt_oss(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    yarn = {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 64}
    own: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22}
    own |= {"sliding_window": 31, "rope_parameters": yarn | {"rope_theta": 150.0}, "head_dim": 16}
    return Variant(name, "GptOssConfig", "GptOssForCausalLM", SIX_HEADS | own | settings, controls)


def in_rope_scaling(**fields: Any) -> Control:
    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.rope is None or layer.rope.scaling is None:
            return layer
        scaling = msgspec.structs.replace(layer.rope.scaling, **fields)
        return msgspec.structs.replace(layer, rope=msgspec.structs.replace(layer.rope, scaling=scaling))

    return drop_in_layers(changed)


def ernie(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 22, "num_hidden_layers": 3}
    return Variant(name, "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", SIX_HEADS | own | settings, controls)


MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
RENORMALIZED = {"sum": routing(renormalize=False)}


def minimax(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22, "rotary_dim": 12}
    return Variant(name, "MiniMaxM2Config", "MiniMaxM2ForCausalLM", SIX_HEADS | own | settings, controls)


def qwen_vl_moe(name: str, controls: dict[str, Control], **text: Any) -> Variant:
    own = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 72, "deepstack_visual_indexes": [0]}
    return qwen_vl(name, "Qwen3VLMoe", vision, controls, **(own | text))


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
    qwen_vl_moe("qwen3-vl-moe", RENORMALIZED, head_dim=24),
    qwen_vl_moe(
        "qwen3-vl-moe-some", {}, head_dim=24, mlp_only_layers=[0], num_hidden_layers=3, moe_intermediate_size=36
    ),
    minimax("minimax-m2", RENORMALIZED | {"sigmoid": routing(scoring="softmax")}),
    minimax("minimax-m2-whole-heads", {}, rotary_dim=24, num_experts_per_tok=2, tie_word_embeddings=True),
    mixtral("mixtral", RENORMALIZED, sliding_window=None),
    mixtral("mixtral-one-expert", {"window": drop_in_layers(without_window)}, num_experts_per_tok=1, sliding_window=31),
    olmoe("olmoe", {"no sum": routing(renormalize=True), "clip": drop(qkv_clip=0.0)}, clip_qkv=0.7),
    olmoe("olmoe-renormalized", RENORMALIZED, norm_topk_prob=True, num_key_value_heads=6),
    granite("granite-moe", RENORMALIZED | {"residual scale": drop(residual_scale=1.0)}, tie_word_embeddings=True),
    granite("granite-moe-shared", RENORMALIZED, shared_intermediate_size=26, num_experts_per_tok=2),
    glm(
        "glm4-moe",
        RENORMALIZED | {"scale": routing(scale=1.0), "sigmoid": routing(scoring="softmax")},
        routed_scaling_factor=1.7,
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
    glm(
        "glm4-moe-groups",
        {"groups": routing(num_groups=1), "group score": routing(group_score="max")},
        n_group=3,
        topk_group=2,
        n_shared_experts=2,
        first_k_dense_replace=2,
        norm_topk_prob=False,
    ),
    gpt_oss(
        "gpt-oss",
        RENORMALIZED
        | {
            "window": drop_in_layers(without_window),
            "activation": drop(activation="silu"),
            "yarn": drop_in_layers(without_rope_scaling),
            "whole pairs": in_rope_scaling(truncate=True),
        },
    ),
    gpt_oss(
        "gpt-oss-wide",
        RENORMALIZED,
        num_local_experts=7,
        num_experts_per_tok=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        rope_parameters=None,
        num_hidden_layers=3,
        tie_word_embeddings=True,
        initializer_range=0.15,
    ),
    ernie("ernie-moe", RENORMALIZED, moe_layer_end_index=1),
    ernie(
        "ernie-moe-one-expert",
        RENORMALIZED,
        moe_k=1,
        moe_num_shared_experts=0,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
]
