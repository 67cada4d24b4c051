"""Checkpoints of families with experts."""

from collections.abc import Callable
from typing import Any

from tests.families.llama_like import SIX_HEADS, qwen_vl
from tests.families.variant import NO_ROPE_SCALING, NO_WINDOW, Control, Variant, drop, drop_in, routing


def mixture(family: str, **own: Any) -> Callable[..., Variant]:
    """A function that makes variants of this family, with six heads and the settings `own`."""

    def variant(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
        return Variant(name, f"{family}Config", f"{family}ForCausalLM", SIX_HEADS | own | settings, controls)

    return variant


DEEP = {"num_experts_per_tok": 3, "moe_intermediate_size": 22, "num_hidden_layers": 3}
FEW = {"num_experts_per_tok": 3, "intermediate_size": 22}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 64}
qwen3 = mixture("Qwen3Moe", **DEEP | {"num_experts": 5, "moe_intermediate_size": 20})
qwen2 = mixture("Qwen2Moe", **DEEP, num_experts=5, shared_expert_intermediate_size=26)
mixtral = mixture("Mixtral", **FEW, num_local_experts=5)
olmoe = mixture("Olmoe", **FEW, num_experts=5, head_dim=16)
glm = mixture("Glm4Moe", **DEEP, n_routed_experts=6)
ernie = mixture("Ernie4_5_Moe", moe_num_experts=5, moe_k=3, moe_intermediate_size=22, num_hidden_layers=3)
minimax = mixture("MiniMaxM2", **FEW, num_local_experts=5, rotary_dim=12)
gpt_oss = mixture(
    "GptOss",
    **FEW,
    num_local_experts=5,
    sliding_window=31,
    rope_parameters=GPT_OSS_ROPE | {"rope_theta": 150.0},
    head_dim=16,
)


def granite(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    kind = "GraniteMoeShared" if "shared_intermediate_size" in settings else "GraniteMoe"
    own = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22} | MULTIPLIERS
    return Variant(name, f"{kind}Config", f"{kind}ForCausalLM", SIX_HEADS | own | settings, controls)


MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
RENORMALIZED = {"sum": routing(renormalize=False)}


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
        RENORMALIZED | {"window": NO_WINDOW},
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
    mixtral("mixtral-one-expert", {"window": NO_WINDOW}, num_experts_per_tok=1, sliding_window=31),
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
            "window": NO_WINDOW,
            "activation": drop(activation="silu"),
            "yarn": NO_ROPE_SCALING,
            "whole pairs": drop_in("rope.scaling", truncate=True),
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
