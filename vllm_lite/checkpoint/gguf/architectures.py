"""GGUF architectures: their names in config.json, and the peculiarities of their files."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_lite.checkpoint.gguf import names
from vllm_lite.checkpoint.gguf.architecture import Architecture, Changes, experts, granite_factors
from vllm_lite.checkpoint.gguf.changes import OneMore
from vllm_lite.checkpoint.gguf.encoders import ENCODERS
from vllm_lite.checkpoint.gguf.gemma4 import BY_LAYER, gemma4
from vllm_lite.checkpoint.gguf.header import GgufHeader
from vllm_lite.checkpoint.gguf.hybrids import HYBRIDS
from vllm_lite.checkpoint.gguf.metadata import Metadata
from vllm_lite.errors import ModelError


def _qwen2_moe(of: Metadata) -> dict[str, Any]:
    shared = of.integer("expert_shared_feed_forward_length", None)
    return experts(of) | {
        "norm_topk_prob": of.flag("expert_weights_norm", default=False),
        "shared_expert_intermediate_size": shared or of.shape("blk.0.ffn_gate_shexp.weight")[0],
    }


def _qwen3_moe(of: Metadata) -> dict[str, Any]:
    return experts(of) | {"norm_topk_prob": of.flag("expert_weights_norm", default=True)}


def _mixtral(of: Metadata) -> dict[str, Any]:
    found = experts(of)
    return {
        "num_local_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "sliding_window": None,
    }


def _gpt_oss(of: Metadata) -> dict[str, Any]:
    found = experts(of)
    return {
        "num_local_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "intermediate_size": found["moe_intermediate_size"],
        "sliding_window": of.integer("attention.sliding_window"),
    }


def _mistral3(of: Metadata) -> dict[str, Any]:
    """Keys of Mistral Small 3.1 and similar models, which are Llamas; Ministral 3 scales queries by their position, see
    `config`."""
    return {} if of.number("attention.temperature_scale", None) else {"architectures": ["LlamaForCausalLM"]}


def _olmoe(of: Metadata) -> dict[str, Any]:
    found = experts(of)
    own = {key: found[key] for key in ("num_experts", "num_experts_per_tok")}
    own["clip_qkv"] = of.number("attention.clamp_kqv", None)
    return own | {
        "norm_topk_prob": of.flag("expert_weights_norm", default=False),
        "intermediate_size": found["moe_intermediate_size"],
    }


def _windows(of: Metadata, every: int) -> dict[str, Any]:
    """Windows in all layers but every `every`-th. Newer files give the pattern, for each layer or as a number."""
    window = of.integer("attention.sliding_window", None)
    if not window:
        return {"sliding_window": None}
    own = {"sliding_window": window}
    slides = of.booleans("attention.sliding_window_pattern")
    if slides is not None:
        return own | {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}
    pattern = of.integer("attention.sliding_window_pattern", every)
    types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(of.num_layers)]
    return own | {"layer_types": types}


def _query_scalar(of: Metadata, largest: int) -> float:
    """The size whose square root divides the queries of Gemma 2 and 3: a head's, or another one in the largest models.
    Files do not give it: like llama.cpp, recognize these by the number of layers."""
    if of.num_layers == largest:
        return of.integer("embedding_length") / of.integer("attention.head_count")
    return of.head_size


def _gemma2(of: Metadata) -> dict[str, Any]:
    return _windows(of, 2) | {
        "attn_logit_softcapping": of.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(of, 46),
    }


def _gemma3(of: Metadata) -> dict[str, Any]:
    return _windows(of, 6) | {
        "final_logit_softcapping": of.number("final_logit_softcapping", None),
        "query_pre_attn_scalar": _query_scalar(of, 62),
        "rope_local_base_freq": of.number("rope.freq_base_swa", 10000.0),
        "rope_theta": of.number("rope.freq_base", 1e6),
    }


def _granite_moe(of: Metadata) -> dict[str, Any]:
    found, shared = experts(of), of.integer("expert_shared_feed_forward_length", 0)
    own = {"num_local_experts": found["num_experts"], "num_experts_per_tok": found["num_experts_per_tok"]}
    if shared:
        own |= {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": shared}
    return granite_factors(of) | own | {"intermediate_size": found["moe_intermediate_size"]}


def _window(of: Metadata) -> dict[str, Any]:
    """The window in files of the first versions, where 0 means none."""
    return {"sliding_window": of.integer("attention.sliding_window", None) or None}


def _glm4_moe(of: Metadata) -> dict[str, Any]:
    found = experts(of)
    return {
        "n_routed_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "n_shared_experts": of.integer("expert_shared_count", 1),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "norm_topk_prob": of.flag("expert_weights_norm", default=True),
        "n_group": of.integer("expert_group_count", 1),
        "topk_group": of.integer("expert_group_used_count", 1),
        "first_k_dense_replace": of.integer("leading_dense_block_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in of.tensors,
        "num_nextn_predict_layers": of.integer("nextn_predict_layers", 0),
    }


def _cohere2(of: Metadata) -> dict[str, Any]:
    return _windows(of, 4) | {"logit_scale": of.number("logit_scale", 0.0625)}


def _olmo2(of: Metadata) -> dict[str, Any]:
    if of.integer("attention.sliding_window", None):
        return _windows(of, 4) | {"architectures": ["Olmo3ForCausalLM"]}
    return {}


def _falcon(of: Metadata) -> dict[str, Any]:
    """Keys of a Falcon. The first models have one KV head, or one for each query head, and a single norm."""
    heads, tensors = of.same("attention.head_count"), of.tensors
    kv_heads = of.same("attention.head_count_kv", heads)
    two_norms = "blk.0.attn_norm_2.weight" in tensors
    return {
        "new_decoder_architecture": two_norms or 1 < kv_heads < heads,
        "multi_query": kv_heads == 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "ffn_hidden_size": of.same("feed_forward_length"),
    }


def _neox(of: Metadata) -> dict[str, Any]:
    return {
        "use_parallel_residual": of.flag("use_parallel_residual", default=True),
        "partial_rotary_factor": of.integer("rope.dimension_count", of.head_size) / max(1, of.head_size),
        "hidden_act": "gelu",
    }


def _ernie_moe(of: Metadata) -> dict[str, Any]:
    found = experts(of)
    return {
        "moe_num_experts": found["num_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "moe_num_shared_experts": of.integer("expert_shared_count", 0),
        "moe_layer_start_index": of.integer("leading_dense_block_count", 0),
        "moe_layer_interval": of.integer("interleave_moe_layer_step", 1),
    }


def _deepseek(of: Metadata) -> dict[str, Any]:
    """Keys of latent attention. Files give the sizes of absorbed heads, and those of config.json with the suffix
    "_mla"."""
    size = of.integer("attention.key_length_mla", None)
    if size is None:
        raise ModelError(
            f"{of.named('attention.key_length_mla')} is missing: files that converters of llama.cpp wrote before "
            "April 2025 are not supported"
        )
    found, rotated = experts(of), of.integer("rope.dimension_count")
    return {
        "head_dim": None,
        "partial_rotary_factor": None,
        "num_key_value_heads": of.same("attention.head_count"),
        "kv_lora_rank": of.integer("attention.kv_lora_rank"),
        "q_lora_rank": of.integer("attention.q_lora_rank", None) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": of.integer("attention.value_length_mla"),
        "moe_intermediate_size": found["moe_intermediate_size"],
        "n_routed_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "n_shared_experts": of.integer("expert_shared_count", 0),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "n_group": of.integer("expert_group_count", 1),
        "topk_group": of.integer("expert_group_used_count", 1),
        "first_k_dense_replace": of.integer("leading_dense_block_count", 0),
    }


def _deepseek_v2(of: Metadata) -> dict[str, Any]:
    own = _deepseek(of)
    method = "group_limited_greedy" if own["n_group"] > 1 else "greedy"
    return own | {"topk_method": method, "norm_topk_prob": of.flag("expert_weights_norm", default=False)}


def _deepseek_v3(of: Metadata) -> dict[str, Any]:
    return _deepseek(of) | {"norm_topk_prob": of.flag("expert_weights_norm", default=True)}


def _gate_row(_: Metadata) -> Changes:
    """Change of the shared expert's gate to [1, hidden_size]."""
    return {"ffn_gate_inp_shexp.weight": (OneMore(axis=0, num_axes=2),)}


def _bias_row(_: Metadata) -> Changes:
    """Change of the routing bias to [1, experts]."""
    return {f"exp_probs_b{ending}": (OneMore(axis=0, num_axes=2),) for ending in ("", ".bias", ".weight")}


def _learned(of: Metadata) -> dict[str, Any]:
    return {"n_inner": of.same("feed_forward_length")}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", is_interleaved=True),
    "llama with experts": Architecture("MixtralForCausalLM", _mixtral, is_interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2_moe, changes=_gate_row),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "mistral3": Architecture("Ministral3ForCausalLM", _mistral3, is_interleaved=True),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss, names.GPT_OSS, yarn={"truncate": False}),
    "gemma": Architecture("GemmaForCausalLM", plus_one=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, names.SANDWICH, plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, names.SANDWICH, plus_one=True),
    "gemma4": Architecture("Gemma4ForCausalLM", gemma4, names.GEMMA4, by_layer=BY_LAYER),
    "phi3": Architecture("Phi3ForCausalLM", _window, names.FUSED_GATE),
    "olmo2": Architecture("Olmo2ForCausalLM", _olmo2, names.SANDWICH),
    "olmoe": Architecture("OlmoeForCausalLM", _olmoe),
    "granite": Architecture("GraniteForCausalLM", granite_factors, is_interleaved=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", _granite_moe, is_interleaved=True, splits_gate_up=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _window, names=names.STARCODER2),
    "gpt2": Architecture("GPT2LMHeadModel", _learned, names.GPT2),
    "glm4": Architecture("Glm4ForCausalLM", names=names.GLM4),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _glm4_moe, names.SINGLE_NORM),
    "cohere2": Architecture("Cohere2ForCausalLM", _cohere2),
    "smollm3": Architecture("SmolLM3ForCausalLM", is_interleaved=True),
    "exaone4": Architecture("Exaone4ForCausalLM", lambda of: _windows(of, 4), names.SANDWICH),
    "seed_oss": Architecture("SeedOssForCausalLM", names=names.SINGLE_NORM),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", _ernie_moe, changes=_bias_row),
    "bloom": Architecture("BloomForCausalLM", names=names.BLOOM, stacks_qkv=True),
    "gptneox": Architecture("GPTNeoXForCausalLM", _neox, names.GPT_NEOX, stacks_qkv=True),
    "falcon": Architecture("FalconForCausalLM", _falcon, names.BLOOM, stacks_qkv=True),
    "falcon with two norms": Architecture("FalconForCausalLM", _falcon, names.FALCON_TWO_NORMS, stacks_qkv=True),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _deepseek_v2, names.DEEPSEEK, has_latents=True),
    "deepseek2 with sigmoid": Architecture("DeepseekV3ForCausalLM", _deepseek_v3, names.DEEPSEEK, has_latents=True),
    **HYBRIDS,
    **ENCODERS,
}
"""By general.architecture, or by `key_of`. Architectures without a native family are refused by name."""
SIGMOID = 2
"""Value of expert_gating_func for sigmoid scores."""
VARIANTS: Mapping[str, tuple[str, Callable[[GgufHeader], bool]]] = {
    "llama": ("with experts", lambda header: bool(header.metadata.get("llama.expert_count"))),
    "falcon": ("with two norms", lambda header: "blk.0.attn_norm_2.weight" in header.tensors),
    "deepseek2": ("with sigmoid", lambda header: header.metadata.get("deepseek2.expert_gating_func") == SIGMOID),
}
"""Names that stand for two architectures: the suffix of the second one's key, and the test for its files."""


def key_of(header: GgufHeader) -> str | None:
    """The key of a file in ARCHITECTURES; None if there is none."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or " " in name:
        return None
    if name in VARIANTS:
        other, is_other = VARIANTS[name]
        name = f"{name} {other}" if is_other(header) else name
    return name if name in ARCHITECTURES else None
