"""Checkpoints of the families with latent attention, DeepSeek's."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tests.families.gemma_like import SIGHT
from tests.families.llama_like import HALVES, PIXTRAL, YARN, without_growth
from tests.families.variant import Control, Variant, drop_in, drop_in_layers, routing
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "initializer_range": 0.25,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 3,
}
MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
GROUPS = {"n_routed_experts": 6, "n_group": 3, "topk_group": 2}
"""Three groups of two experts."""


def scaled_plainly(layer: LayerSpec) -> LayerSpec:
    """The scale without YaRN's magnitude."""
    assert layer.latent is not None
    attention = msgspec.structs.replace(layer.attention, scale=layer.latent.query_size**-0.5)
    return msgspec.structs.replace(layer, attention=attention)


UNROTATED = drop_in("rope", theta=1e30, scaling=None)
"""A control: the part of K that all heads share is not rotated, nor is that of Q."""


def deepseek(version: str, name: str, settings: dict[str, Any], controls: dict[str, Control]) -> Variant:
    config, model = f"Deepseek{version}Config", f"Deepseek{version}ForCausalLM"
    usual = {"n_routed_experts": 5, "rope_parameters": MSCALE}
    return Variant(f"deepseek-{name}", config, model, SIZES | usual | settings, controls)


class Fixed(torch.nn.Module):
    """A product with a weight that is not a torch.nn.Linear's."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.fixed = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.fixed.t()


def round_by_head(reference: Any, spec: ModelSpec, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a model of transformers have the matrices that expand the latent as int8 has them when they are absorbed:
    that from Q into the space of the latent has its scales there. `rounded`: a matrix with a scale for each row."""
    if any(own.latent is None for own in spec.layers):
        return
    for layer, own in zip(reference.get_decoder().layers, spec.layers, strict=True):
        assert own.latent is not None
        sizes = (own.latent.nope_size, own.latent.value_size)
        weight = layer.self_attn.kv_b_proj.weight.detach()
        pairs = (head.split(sizes) for head in weight.split(sum(sizes)))
        layer.self_attn.kv_b_proj = Fixed(
            torch.cat([part for k, v in pairs for part in (rounded(k.t()).t(), rounded(v))])
        )


def mistral4(name: str, settings: dict[str, Any], controls: dict[str, Control]) -> Variant:
    rope = MSCALE | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 8 / 28}
    usual = {"n_routed_experts": 5, "q_lora_rank": 20, "rope_parameters": rope}
    return Variant(name, "Mistral4Config", "Mistral4ForCausalLM", SIZES | usual | settings, controls)


def glm_lite(name: str, settings: dict[str, Any], controls: dict[str, Control]) -> Variant:
    usual = {"n_routed_experts": 6, "q_lora_rank": 20, "routed_scaling_factor": 1.8}
    own = {key: value for key, value in SIZES.items() if key != "first_k_dense_replace"}
    return Variant(name, "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", own | usual | settings, controls)


def sparse(name: str, family: str, settings: dict[str, Any], controls: dict[str, Control]) -> Variant:
    """A model with an index whose scores rarely tie, because it has so many heads that some score of a token is above
    0."""
    usual = {"n_routed_experts": 5, "q_lora_rank": 20, "n_group": 1, "topk_group": 1}
    usual |= {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}
    return Variant(name, f"{family}Config", f"{family}ForCausalLM", SIZES | usual | settings, controls)


VARIANTS = [
    deepseek(
        "V2",
        "v2-lite",
        {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        {
            "magnitude": drop_in_layers(scaled_plainly),
            "neighbours": HALVES,
            "shared rotated part": UNROTATED,
            "norms": drop_in("latent", norm_eps=0.5),
            "scale": routing(scale=1.0),
        },
    ),
    deepseek(
        "V2",
        "v2-groups",
        GROUPS | {"q_lora_rank": 20, "n_shared_experts": 1, "topk_method": "group_limited_greedy"},
        {"groups": routing(num_groups=1)},
    ),
    deepseek(
        "V3",
        "v3",
        GROUPS | {"q_lora_rank": 20, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
        {
            "magnitude": drop_in_layers(scaled_plainly),
            "neighbours": HALVES,
            "sum": routing(renormalize=False),
        },
    ),
    deepseek(
        "V3",
        "v3-plain",
        {"q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "rope_interleave": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "norm_topk_prob": False},
        {"scoring": routing(scoring="softmax")},
    ),
    mistral4(
        "mistral4",
        {"first_k_dense_replace": 0},
        {
            "growth": drop_in_layers(without_growth),
            "magnitude": drop_in_layers(scaled_plainly),
            "sum": routing(renormalize=False),
        },
    ),
    mistral4("mistral4-groups", GROUPS | {"norm_topk_prob": False}, {"group score": routing(group_score="max")}),
    Variant(
        "mistral3-mistral4",
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": SIZES
            | {"model_type": "mistral4", "n_routed_experts": 5, "q_lora_rank": 20, "num_hidden_layers": 2},
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    Variant(
        "kimi-k25",
        "Kimi_K25Config",
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": SIZES
            | {"model_type": "kimi_k2", "n_routed_experts": 5, "q_lora_rank": 20}
            | {"n_group": 1, "topk_group": 1, "num_hidden_layers": 2},
            "vision_config": SIGHT | {"pos_emb_time": 2},
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
        },
    ),
    sparse(
        "deepseek-v32",
        "DeepseekV32",
        {"rope_parameters": MSCALE},
        {"all tokens": drop_in("latent.index", count=1000), "halves": drop_in("latent.index", interleaved=True)},
    ),
    sparse(
        "glm-moe-dsa",
        "GlmMoeDsa",
        {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "shared"]},
        {"all tokens": drop_in("latent.index", count=1000), "neighbours": drop_in("latent.index", interleaved=False)},
    ),
    sparse("glm-moe-dsa-each", "GlmMoeDsa", {"index_n_heads": 24, "index_topk": 40}, {}),
    glm_lite("glm4-moe-lite", {}, {"neighbours": HALVES, "scale": routing(scale=1.0)}),
    glm_lite(
        "glm4-moe-lite-kinds",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
        {"groups": routing(num_groups=1)},
    ),
]
