"""Checkpoints of the families that put norms and blocks together in another way than Llama."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tests.families.variant import NO_ROPE_SCALING, NO_WINDOW, Variant, drop, drop_in, drop_in_layers, routing
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
ODD = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 387}
"""Groups of three heads; 387 tokens are not a multiple of 8."""
CALM = {"initializer_range": 0.15}
"""Gemma's norms make everything twice as large, as their random weights are about 1, to which they add 1."""
LONG = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def _norm(**fields: Any) -> Any:
    return lambda spec: msgspec.structs.replace(spec, norm=msgspec.structs.replace(spec.norm, **fields))


def _one_rope(spec: ModelSpec) -> ModelSpec:
    """Sliding layers turn as those that see everything do."""
    full = next(layer.rope for layer in spec.layers if layer.attention.window is None)
    return drop_in_layers(lambda layer: msgspec.structs.replace(layer, rope=full))(spec)


def _everywhere(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, rope=Rope(10000.0, interleaved=True))


def _other_kv(spec: ModelSpec) -> ModelSpec:
    """A control: layers without K and V of their own attend to those of the first similar layer."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.kv_layer is None:
            return layer
        alike = (index for index, other in enumerate(spec.layers) if other.attention == layer.attention)
        return msgspec.structs.replace(layer, kv_layer=next(alike))

    return drop_in_layers(changed)(spec)


def _nested(**text: Any) -> Mapping[str, Any]:
    """A model that sees images, as small as can be."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return {"text_config": CALM | text, "vision_config": vision, "mm_tokens_per_image": 4, "tie_word_embeddings": True}


GEMMA = [
    Variant(
        "gemma",
        "GemmaConfig",
        "GemmaForCausalLM",
        {**ODD, **CALM, "num_key_value_heads": 1, "head_dim": 80, "hidden_act": "gelu", "tie_word_embeddings": True},
        {
            "one added to norms": _norm(plus_one=False),
            "embedding scale": drop(embedding_scale=1.0),
            "activation": drop(activation="silu"),
        },
    ),
    Variant("gemma-wide", "GemmaConfig", "GemmaForCausalLM", {**CALM, "num_key_value_heads": 4, "head_dim": 256}),
    Variant(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **ODD,
            **CALM,
            "head_dim": 64,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
        {
            "window": NO_WINDOW,
            "soft cap of attention": drop_in("attention", soft_cap=0.0),
            "soft cap of logits": drop(logits_soft_cap=0.0),
            "scale": drop_in("attention", scale=64**-0.5),
            "embedding scale": drop(embedding_scale=1.0),
            "one added to norms": _norm(plus_one=False),
        },
    ),
    Variant(
        "gemma2-biased",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **CALM,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 400,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    Variant(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **ODD,
            **CALM,
            "head_dim": 80,
            "num_hidden_layers": 7,
            "initializer_range": 0.1,
            "sliding_window": 31,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 50,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
        {
            "window": NO_WINDOW,
            "soft cap of logits": drop(logits_soft_cap=0.0),
            "rope scaling": NO_ROPE_SCALING,
            "rope by layer type": _one_rope,
        },
    ),
    Variant(
        "gemma3-nested",
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        _nested(
            **ODD,
            head_dim=128,
            num_hidden_layers=3,
            sliding_window=200,
            layer_types=[SLIDING, FULL, SLIDING],
        ),
        {"rope by layer type": _one_rope},
    ),
]


def gemma4(name: str, controls: Mapping[str, Any], **settings: Any) -> Variant:
    """Every second layer slides; the others have larger heads, and KV heads of their own number."""
    own = {
        **ODD,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 31,
        "initializer_range": 0.2,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }
    return Variant(name, "Gemma4TextConfig", "Gemma4ForCausalLM", own | settings, controls)


def unified_text(name: str, controls: Mapping[str, Any], **settings: Any) -> Variant:
    own = dict(gemma4(name, controls, **settings).settings)
    del own["hidden_size_per_layer_input"]
    return Variant(name, "Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM", own, controls)


def gemma4_unified(name: str, controls: Mapping[str, Any], **text: Any) -> Variant:
    """A model in which what is seen and heard passes the layers as tokens do."""
    settings = {
        "text_config": unified_text(name, controls, **text).settings,
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 16},
        "tie_word_embeddings": True,
    }
    return Variant(name, "Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration", settings, controls)


GEMMA4 = [
    gemma4(
        "gemma4",
        {
            "window": NO_WINDOW,
            "scale": drop_in("attention", scale=0.25),
            "norm of values": drop(value_norm=False),
            "a quarter of the pairs": NO_ROPE_SCALING,
            "soft cap of logits": drop(logits_soft_cap=0.0),
        },
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=6.0,
    ),
    gemma4(
        "gemma4-moe",
        {"one expert": routing(experts_per_token=1)},
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=3,
        moe_intermediate_size=22,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    Variant(
        "gemma4-per-layer",
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **ODD,
                "head_dim": 8,
                "global_head_dim": 16,
                "num_hidden_layers": 5,
                "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
                "sliding_window": 31,
                "initializer_range": 0.08,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 387,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "tie_word_embeddings": True,
        },
        {"K and V of another layer": _other_kv, "norm of values": drop(value_norm=False)},
    ),
    gemma4_unified(
        "gemma4-unified",
        {"window": NO_WINDOW, "norm of values": drop(value_norm=False)},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=6.0,
    ),
    unified_text(
        "gemma4-unified-shared",
        {"K and V of another layer": _other_kv},
        num_hidden_layers=5,
        layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
]
GLM = [
    Variant(
        "glm4",
        "Glm4Config",
        "Glm4ForCausalLM",
        {**ODD, "head_dim": 80, "pad_token_id": 0, "num_hidden_layers": 3, "initializer_range": 0.25},
        {"interleaved": drop_in("rope", interleaved=False), "half of each head": drop_in("rope", rotary_size=None)},
    ),
    Variant(
        "glm4-plain",
        "Glm4Config",
        "Glm4ForCausalLM",
        {
            "num_key_value_heads": 4,
            "num_attention_heads": 4,
            "head_dim": 64,
            "pad_token_id": 0,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "glm",
        "GlmConfig",
        "GlmForCausalLM",
        {**ODD, "head_dim": 128, "pad_token_id": 0, "tie_word_embeddings": True},
        {"interleaved": drop_in("rope", interleaved=False)},
    ),
    Variant(
        "glm-one-kv-head",
        "GlmConfig",
        "GlmForCausalLM",
        {**ODD, "num_key_value_heads": 1, "head_dim": 96, "pad_token_id": 0},
    ),
]
OLMO = [
    Variant(
        "olmo2",
        "Olmo2Config",
        "Olmo2ForCausalLM",
        {**ODD, "hidden_size": 144},
    ),
    Variant(
        "olmo2-one-kv-head",
        "Olmo2Config",
        "Olmo2ForCausalLM",
        {
            "hidden_size": 192,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "olmo3",
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            **ODD,
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "rope_parameters": {
                FULL: {**LONG, "rope_theta": 5e5},
                SLIDING: {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        {
            "window": NO_WINDOW,
            "yarn": NO_ROPE_SCALING,
            "rope by layer type": _one_rope,
        },
    ),
    Variant(
        "olmo3-full",
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            "hidden_size": 160,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "sliding_window": 300,
            "layer_types": [FULL, SLIDING],
            "tie_word_embeddings": True,
        },
    ),
]
COHERE = [
    Variant(
        "cohere2",
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {
            **ODD,
            "hidden_size": 144,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
        {
            "window": NO_WINDOW,
            "logit scale": drop(logits_scale=1.0),
            "interleaved": drop_in("rope", interleaved=False),
            "layers without rope": drop_in_layers(_everywhere),
            "centered norm": _norm(kind="wide rms"),
        },
    ),
    Variant(
        "cohere2-biased",
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {
            "hidden_size": 384,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "num_hidden_layers": 3,
            "sliding_window": 256,
            "layer_types": [FULL, SLIDING, FULL],
            "attention_bias": True,
        },
    ),
]
SIGHT = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "patch_size": 4} | {
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
"""Sees images."""


def muse(name: str, controls: Mapping[str, Any], **text: Any) -> Variant:
    settings = {
        "text_config": CALM
        | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
        | {"hidden_size": 96, "sliding_window": 21, "post_norm_eps": 1.5, "qk_scale_factor": 2.0}
        | text,
        "vision_config": SIGHT,
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        "tie_word_embeddings": False,
    }
    return Variant(f"muse-{name}", "MuseGlimmerConfig", "MuseGlimmerForConditionalGeneration", settings, controls)


MUSE = [
    muse(
        "glimmer",
        {
            "window": NO_WINDOW,
            "scale of Q": drop_in("attention", scale=24**-0.5),
            "norm of Q and K": drop(qk_norm=None),
            "eps behind blocks": drop(output_norm_eps=None),
            "layers without rope": drop_in_layers(_everywhere),
            "soft cap": drop(logits_soft_cap=0.0),
        },
        output_multiplier=8.0,
    ),
    muse("glimmer-kinds", {}, layer_rope_theta=[0, 1e4, 0], layer_types=[FULL, FULL, SLIDING], num_hidden_layers=3),
]
VARIANTS: list[Variant] = [*GEMMA, *GEMMA4, *GLM, *OLMO, *COHERE, *MUSE]
