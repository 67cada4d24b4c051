"""Checkpoints of the families that differ little from Llama."""

from typing import Any

import msgspec

from tests.families.variant import NO_ROPE_SCALING, NO_WINDOW, Control, Variant, drop, drop_in, drop_in_layers
from vllm_lite.checkpoint.layer_specs.rope import LongRope, Rope
from vllm_lite.checkpoint.model_spec import LayerSpec

SIX_HEADS = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "initializer_range": 0.25,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
MINISTRAL_ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}


PIXTRAL = {
    "model_type": "pixtral",
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
"""The config of the vision tower."""


def without_growth(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, query_growth=None)


def with_other_factors(layer: LayerSpec) -> LayerSpec:
    """Longrope of the other side of the original context."""
    assert layer.rope is not None
    assert isinstance(layer.rope.scaling, LongRope)
    own = layer.rope.scaling
    swapped = msgspec.structs.replace(own, short=own.long, long=own.short)
    return msgspec.structs.replace(layer, rope=msgspec.structs.replace(layer.rope, scaling=swapped))


HALVES = drop_in("rope", interleaved=False)
"""A control: rotates halves instead of adjacent elements."""


def rotated_everywhere(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, rope=layer.rope or Rope(2e6))


def usual_scale(layer: LayerSpec) -> LayerSpec:
    own = layer.attention
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(own, scale=own.head_size**-0.5))


def llama(name: str, rope: dict[str, Any], max_model_len: int = 256, **settings: Any) -> Variant:
    """A Llama with a kind of rope of its own."""
    controls = {"scaling": NO_ROPE_SCALING}
    settings = SIX_HEADS | settings | {"rope_parameters": {"rope_theta": 10000.0} | rope}
    return Variant(f"llama-{name}", "LlamaConfig", "LlamaForCausalLM", settings, controls, max_model_len)


def longrope(pairs: int, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(pairs)],
        "original_max_position_embeddings": original,
    }


def phi3(name: str, settings: dict[str, Any], **controls: Any) -> Variant:
    sizes = {"pad_token_id": 0, "vocab_size": 387}
    return Variant(f"phi3-{name}", "Phi3Config", "Phi3ForCausalLM", sizes | settings, controls)


def mistral3(name: str, text: dict[str, Any], *, tied: bool, **controls: Any) -> Variant:
    """A model that also sees images."""
    settings = {
        "text_config": {"vocab_size": 387} | text,
        "vision_config": PIXTRAL,
        "tie_word_embeddings": tied,
    }
    return Variant(f"mistral3-{name}", "Mistral3Config", "Mistral3ForConditionalGeneration", settings, controls)


def smolvlm(name: str, family: str, *, tied: bool) -> Variant:
    """A Llama beside a tower, which sees no image here."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {
        "text_config": {"model_type": "llama", "vocab_size": 387, "num_attention_heads": 4, "num_key_value_heads": 2},
        "vision_config": vision | {"image_size": 16, "patch_size": 8},
        "image_token_id": 386,
        "tie_word_embeddings": tied,
    }
    return Variant(name, f"{family}Config", f"{family}ForConditionalGeneration", settings)


def llava(name: str, family: str, text: str, vision: dict[str, Any], **more: Any) -> Variant:
    """Text of another family beside a tower, which sees no image here."""
    own = {"model_type": text, "vocab_size": 387, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"text_config": own, "vision_config": vision, "image_token_index": 386, **more}
    return Variant(name, f"{family}Config", f"{family}ForConditionalGeneration", settings)


SQUARES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARES |= {"image_size": 16, "patch_size": 8}
CLIP_TOWER = SQUARES | {"model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP_TOWER = SQUARES | {"model_type": "siglip_vision_model", "vision_use_head": False}


def qwen_vl(
    name: str, generation: str, vision: dict[str, Any], controls: dict[str, Control] | None = None, **text: Any
) -> Variant:
    """A Qwen that also takes images; the prompts here have none."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    rope |= {"mrope_interleaved": True} if generation.startswith("Qwen3") else {}
    heads = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}
    marks = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    settings: dict[str, Any] = {
        "text_config": {"vocab_size": 391, "rope_parameters": rope} | heads | text,
        "vision_config": {"num_heads": 2, "depth": 1, "patch_size": 4} | vision,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **{mark: 385 + index for index, mark in enumerate(marks)},
    }
    return Variant(name, f"{generation}Config", f"{generation}ForConditionalGeneration", settings, controls or {})


CALM = {"initializer_range": 0.15}
"""Settings for wide models, in which the rounding of float32 would otherwise exceed the tests' tolerance."""
QWEN = [
    Variant(
        "qwen2-odd-tied",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 387}
        | CALM
        | {"tie_word_embeddings": True},
    ),
    Variant(
        "qwen2-window",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"num_hidden_layers": 3, "max_window_layers": 1, "use_sliding_window": True, "sliding_window": 40}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"window": NO_WINDOW},
    ),
    qwen_vl("qwen2-vl", "Qwen2VL", {"embed_dim": 32, "hidden_size": 72, "mlp_ratio": 2}),
    qwen_vl(
        "qwen2_5-vl-tied",
        "Qwen2_5_VL",
        {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 72},
        tie_word_embeddings=True,
    ),
    qwen_vl(
        "qwen3-vl",
        "Qwen3VL",
        {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 72, "num_position_embeddings": 16}
        | {"deepstack_visual_indexes": [0]},
        head_dim=24,
    ),
]
SEED_OSS = [
    Variant("seed_oss", "SeedOssConfig", "SeedOssForCausalLM", SIX_HEADS | {"head_dim": 64, "vocab_size": 389}),
]
MISTRAL = [
    Variant(
        "mistral-head128",
        "MistralConfig",
        "MistralForCausalLM",
        {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 387}
        | {"sliding_window": 200},
    ),
    Variant(
        "ministral-window",
        "MinistralConfig",
        "MinistralForCausalLM",
        {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 387}
        | {"sliding_window": 33, "layer_types": ["sliding_attention", "full_attention"]},
        {"window": NO_WINDOW},
    ),
    Variant(
        "ministral3",
        "Ministral3Config",
        "Ministral3ForCausalLM",
        SIX_HEADS | {"rope_parameters": MINISTRAL_ROPE},
        {"yarn": NO_ROPE_SCALING, "growth": drop_in_layers(without_growth)},
    ),
    mistral3(
        "small",
        {"model_type": "mistral", "hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"head_dim": 80, "sliding_window": None},
        tied=False,
    ),
    mistral3(
        "ministral3-tied",
        SIX_HEADS
        | {"model_type": "ministral3", "head_dim": 96, "sliding_window": 50, "rope_parameters": MINISTRAL_ROPE},
        tied=True,
        window=NO_WINDOW,
        growth=drop_in_layers(without_growth),
    ),
]
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.05,
    "logits_scaling": 2.5,
}
GRANITE = [
    Variant(
        "granite-tied",
        "GraniteConfig",
        "GraniteForCausalLM",
        {"hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2}
        | GRANITE_FACTORS
        | {"tie_word_embeddings": True, "vocab_size": 389},
        {
            "embedding": drop(embedding_scale=1.0),
            "residual": drop(residual_scale=1.0),
            "logits": drop(logits_scale=1.0),
            "scale": drop_in_layers(usual_scale),
        },
    ),
    Variant(
        "granite-biases",
        "GraniteConfig",
        "GraniteForCausalLM",
        GRANITE_FACTORS
        | {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 2}
        | {"hidden_size": 160, "num_key_value_heads": 1}
        | CALM,
    ),
]
GRANITE_SWA = [
    Variant(
        "granite-swa",
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        SIX_HEADS
        | GRANITE_FACTORS
        | {"num_hidden_layers": 4, "sliding_window": 31, "layer_rope_theta": [0, 500, 10000, 500]}
        | {"tie_word_embeddings": True, "vocab_size": 389, "head_dim": 16},
        {
            "window": NO_WINDOW,
            "no rope": drop_in_layers(rotated_everywhere),
            "thetas": drop_in("rope", theta=1e4),
        },
    ),
    Variant(
        "granite-swa-plain",
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        CALM | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 70, "attention_bias": True},
    ),
]
SMOLLM3 = [
    Variant(
        "smollm3-tied",
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2}
        | {"num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": 0, "initializer_range": 0.2},
        {"no rope": drop_in_layers(rotated_everywhere)},
    ),
    Variant(
        "smollm3-window",
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 40, "pad_token_id": 0}
        | {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 387},
        {"window": NO_WINDOW, "no rope": drop_in_layers(rotated_everywhere)},
    ),
]
PHI3 = [
    phi3(
        "window",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 40} | CALM,
        window=NO_WINDOW,
    ),
    phi3(
        "long-partial-tied",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "partial_rotary_factor": 0.75}
        | {"original_max_position_embeddings": 64, "rope_parameters": longrope(6, 64), "tie_word_embeddings": True},
        sides=drop_in_layers(with_other_factors),
        magnitude=drop_in("rope", attention_factor=1.0),
        pairs=drop_in("rope", interleaved=True),
    ),
    phi3(
        "short",
        {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"original_max_position_embeddings": 256, "rope_parameters": longrope(40, 256)}
        | CALM,
        sides=drop_in_layers(with_other_factors),
    ),
]
ERNIE = [
    Variant(
        "ernie-tied",
        "Ernie4_5Config",
        "Ernie4_5ForCausalLM",
        SIX_HEADS | {"tie_word_embeddings": True, "vocab_size": 389},
        {"neighbours": HALVES},
    ),
    Variant(
        "ernie-biases", "Ernie4_5Config", "Ernie4_5ForCausalLM", SIX_HEADS | CALM | {"head_dim": 80, "use_bias": True}
    ),
]
EXAONE = [
    Variant(
        "exaone4-window",
        "Exaone4Config",
        "Exaone4ForCausalLM",
        SIX_HEADS | {"num_hidden_layers": 4, "sliding_window": 40, "initializer_range": 0.2},
        {"window": NO_WINDOW, "no rope": drop_in_layers(rotated_everywhere)},
    ),
    Variant(
        "exaone4-full-tied",
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 387}
        | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
]
ARCEE = [
    Variant(
        "arcee",
        "ArceeConfig",
        "ArceeForCausalLM",
        SIX_HEADS | {"rope_parameters": YARN, "vocab_size": 387},
        {"relu": drop(activation="relu"), "yarn": NO_ROPE_SCALING},
    ),
    Variant(
        "arcee-biases",
        "ArceeConfig",
        "ArceeForCausalLM",
        CALM | {"num_attention_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
]
APERTUS = [
    Variant(
        "apertus",
        "ApertusConfig",
        "ApertusForCausalLM",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 387},
        {"llama 3's rope": NO_ROPE_SCALING},
    ),
    Variant(
        "apertus-plain",
        "ApertusConfig",
        "ApertusForCausalLM",
        CALM
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
]
HUNYUAN = [
    Variant(
        "hunyuan",
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        SIX_HEADS
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}},
        {"theta": drop_in_layers(lambda layer: msgspec.structs.replace(layer, rope=Rope(1e4)))},
    ),
    Variant(
        "hunyuan-tied",
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        CALM
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "attention_bias": True}
        | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
]
ROPES = [
    Variant(
        "llama-yarn",
        "LlamaConfig",
        "LlamaForCausalLM",
        SIX_HEADS | {"rope_parameters": YARN},
        {"yarn": NO_ROPE_SCALING, "magnitude": drop_in("rope", attention_factor=1.0)},
    ),
    llama("linear", {"rope_type": "linear", "factor": 4.0}),
    llama("dynamic", {"rope_type": "dynamic", "factor": 3.0}, 150, max_position_embeddings=64),
    llama("longrope", longrope(12, 64)),
]
VARIANTS: list[Variant] = [
    smolvlm("smolvlm", "SmolVLM", tied=False),
    smolvlm("idefics3", "Idefics3", tied=True),
    llava("llava", "Llava", "llama", CLIP_TOWER),
    llava("llava-pixtral", "Llava", "mistral", PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full"),
    llava("llava-next", "LlavaNext", "mistral", CLIP_TOWER, image_grid_pinpoints=[[16, 32]]),
    llava("llava-onevision", "LlavaOnevision", "qwen2", SIGLIP_TOWER, image_grid_pinpoints=[[16, 32]]),
    *QWEN,
    *SEED_OSS,
    *MISTRAL,
    *GRANITE,
    *GRANITE_SWA,
    *SMOLLM3,
    *PHI3,
    *ERNIE,
    *EXAONE,
    *ARCEE,
    *APERTUS,
    *HUNYUAN,
    *ROPES,
]
