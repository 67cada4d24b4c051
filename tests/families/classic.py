"""Checkpoints of the families that came before Llama: LayerNorm, biases, fused projections, learned positions."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tests.families.variant import NO_WINDOW, Control, Variant, drop, drop_in

NAMES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "bloom": ("BloomConfig", "BloomForCausalLM"),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "falcon": ("FalconConfig", "FalconForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
}


def _variant(name: str, settings: Mapping[str, Any], controls: Mapping[str, Control] | None = None) -> Variant:
    config, model = NAMES[name.split("-", maxsplit=1)[0]]
    return Variant(name, config, model, settings, controls or {})


def _rms(spec: Any) -> Any:
    return msgspec.structs.replace(spec, norm=msgspec.structs.replace(spec.norm, kind="wide rms"))


NO_ALIBI = {"alibi": drop_in("attention", alibi_slopes=None)}
ODD = {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 387}

VARIANTS: list[Variant] = [
    _variant(
        "gpt2",
        {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 387, "tie_word_embeddings": True},
        {"gelu_new": drop(activation="silu"), "centered norms": _rms},
    ),
    _variant("gpt2-inner", {"n_inner": 100, "num_attention_heads": 4, "activation_function": "relu"}),
    _variant(
        "gpt2-unscaled",
        {
            "num_attention_heads": 2,
            "scale_attn_weights": False,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
        },
        {"no scale": drop_in("attention", scale=32**-0.5)},
    ),
    _variant(
        "opt",
        {**ODD, "ffn_dim": 136, "tie_word_embeddings": True},
        {"relu": drop(activation="gelu")},
    ),
    _variant(
        "opt-plain",
        {"hidden_size": 160, "num_attention_heads": 2, "ffn_dim": 96, "initializer_range": 0.1, "enable_bias": False},
    ),
    _variant("bloom", {**ODD, "tie_word_embeddings": True}, NO_ALIBI),
    _variant("bloom-eight", {"hidden_size": 128, "num_attention_heads": 8}, NO_ALIBI),
    _variant(
        "neox",
        {**ODD, "hidden_size": 480, "initializer_range": 0.1},
        {"parallel blocks": drop(parallel_blocks=False), "partial rope": drop_in("rope", rotary_size=None)},
    ),
    _variant(
        "neox-in-turn",
        {"num_attention_heads": 4, "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
        {"blocks in turn": drop(parallel_blocks=True)},
    ),
    _variant(
        "neox-tied",
        {"num_attention_heads": 4, "rotary_pct": 0.5, "rotary_emb_base": 500.0, "tie_word_embeddings": True},
    ),
    _variant(
        "falcon-one-kv-head",
        {**ODD, "multi_query": True, "ffn_hidden_size": 100, "tie_word_embeddings": True},
        {"gelu": drop(activation="silu")},
    ),
    _variant(
        "falcon-two-norms",
        {**ODD, "hidden_size": 192, "num_kv_heads": 2, "new_decoder_architecture": True, "initializer_range": 0.1},
    ),
    _variant(
        "falcon-one-norm",
        {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    _variant(
        "falcon-alibi",
        {**ODD, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": True},
        NO_ALIBI,
    ),
    _variant(
        "starcoder2",
        {**ODD, "num_key_value_heads": 2, "sliding_window": 33, "tie_word_embeddings": True},
        {"window": NO_WINDOW},
    ),
    _variant(
        "starcoder2-plain",
        {
            "hidden_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "use_bias": False,
            "sliding_window": 200,
            "initializer_range": 0.1,
        },
    ),
]
