"""Gemma 4 in GGUF files: full layers have other heads, and some layers attend to K and V of others. Only the text
model: the parts for images and audio are in another file."""

from typing import Any

from vllm_lite.checkpoint.gguf.metadata import Metadata
from vllm_lite.errors import ModelError

KV_HEADS, INNER = "attention.head_count_kv", "feed_forward_length"
BY_LAYER = KV_HEADS, INNER
FULL, SLIDING = "full_attention", "sliding_attention"
UNTURNED = 1e9
"""Rope divisor above which a pair counts as not rotated."""


def gemma4(of: Metadata) -> dict[str, Any]:
    """Keys of config.json specific to Gemma 4."""
    slides = of.booleans("attention.sliding_window_pattern")
    if slides is None or len(slides) != of.num_layers:
        raise ModelError(f"{of.named('attention.sliding_window_pattern')} must be a flag for each layer")
    kv_heads, shared = of.by_layer(KV_HEADS), of.integer("attention.shared_kv_layers", 0)
    size, small = of.head_size, of.integer("attention.key_length_swa")
    of.must_be("attention.value_length_swa", small)
    full = [layer for layer, slide in enumerate(slides[: of.num_layers - shared]) if not slide]
    per_layer = of.integer("embedding_length_per_layer_input", 0)
    own: dict[str, Any] = {
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "sliding_window": of.integer("attention.sliding_window"),
        "num_key_value_heads": max(kv_heads),
        "head_dim": small,
        "per_layer_config": {
            str(layer): {"head_dim": small if slides[layer] else size, "num_key_value_heads": count}
            for layer, count in enumerate(kv_heads)
        },
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in of.tensors for layer in full),
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": of.number("final_logit_softcapping", None),
        "rope_theta": None,
        "rope_parameters": _ropes(of),
        "hidden_size_per_layer_input": per_layer,
        "enable_moe_block": bool(of.integer("expert_count", 0)),
    }
    if per_layer:
        own["vocab_size_per_layer_input"] = of.shape("per_layer_token_embd.weight")[0]
    return own | _inner(of, shared) | (_experts(of) if own["enable_moe_block"] else {})


def _ropes(of: Metadata) -> dict[str, Any]:
    """The ropes by layer type. Full layers rotate only the first pairs of a head: the file gives the others huge
    divisors."""
    factors = of.factors("rope_freqs.weight") or [1.0]
    turned = factors.count(1.0)
    if any(factor != 1.0 for factor in factors[:turned]) or any(factor < UNTURNED for factor in factors[turned:]):
        raise ModelError("rope_freqs.weight must be 1 for the pairs that turn and then 1e30 for those that do not")
    full = {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    return {
        FULL: full | {"rope_theta": of.number("rope.freq_base", 1e6)},
        SLIDING: {"rope_type": "default", "rope_theta": of.number("rope.freq_base_swa", 1e4)},
    }


def _inner(of: Metadata, shared: int) -> dict[str, Any]:
    """The intermediate sizes. MLPs may be twice as wide in layers without K and V."""
    sizes = of.by_layer(INNER)
    is_double = bool(shared) and sizes[-1] == 2 * sizes[0]
    wanted = [sizes[0] * (1 + (is_double and layer >= of.num_layers - shared)) for layer in range(of.num_layers)]
    if sizes != wanted:
        raise ModelError(f"{of.named(INNER)} differs by layer ({sorted(set(sizes))[:8]}), which is not supported")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": is_double}


def _experts(of: Metadata) -> dict[str, Any]:
    return {
        "num_experts": of.integer("expert_count"),
        "top_k_experts": of.integer("expert_used_count"),
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
    }
