"""GGUF architectures with recurrent layers: the kinds of their layers, and their tensors.

Files have the number of KV heads of each layer, 0 for layers without attention.
"""

from typing import Any

from vllm_lite.checkpoint.gguf import names
from vllm_lite.checkpoint.gguf.architecture import Architecture, Changes, experts, granite_factors
from vllm_lite.checkpoint.gguf.changes import Change, Flat, HeadOrder, LogOfMinus, OneMore
from vllm_lite.checkpoint.gguf.metadata import Metadata

ATTENTION, STATE = "full_attention", "linear_attention"
KV_HEADS, INNER = "attention.head_count_kv", "feed_forward_length"
CONVOLUTION = OneMore(axis=1, num_axes=3)
"""Change of a convolution's weights to [channels, 1, tokens]."""


def _lfm2(of: Metadata) -> dict[str, Any]:
    """Keys of an LFM2; the file has the actual size of MLPs."""
    heads = of.whole_numbers(KV_HEADS)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [ATTENTION if each else "conv" for each in heads],
        "conv_L_cache": of.integer("shortconv.l_cache"),
        "norm_eps": of.number("attention.layer_norm_rms_epsilon", 1e-5),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(of: Metadata) -> dict[str, Any]:
    found = experts(of)
    return _lfm2(of) | {
        "num_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "num_dense_layers": of.integer("leading_dense_block_count", 0),
        "use_expert_bias": any("exp_probs_b" in name for name in of.tensors),
        "norm_topk_prob": of.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
    }


def _granite(of: Metadata) -> dict[str, Any]:
    """Keys of a Granite 4. Without experts, the MLP is called the shared expert."""
    heads, inner = of.whole_numbers(KV_HEADS), of.integer("ssm.inner_size")
    own: dict[str, Any] = {
        "num_key_value_heads": max(heads),
        "layer_types": [ATTENTION if each else STATE for each in heads],
        "position_embedding_type": "rope" if of.flag("rope.scaling.finetuned", default=False) else None,
        "shared_intermediate_size": of.integer("expert_shared_feed_forward_length", 0) or of.same(INNER),
        "mamba_n_heads": of.integer("ssm.time_step_rank"),
        "mamba_d_state": of.integer("ssm.state_size"),
        "mamba_d_conv": of.integer("ssm.conv_kernel"),
        "mamba_n_groups": of.integer("ssm.group_count", 1),
        "mamba_expand": inner // max(1, of.integer("embedding_length")),
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    if of.integer("expert_count", 0):
        found = experts(of)
        own |= {"num_local_experts": found["num_experts"], "num_experts_per_tok": found["num_experts_per_tok"]}
        own["intermediate_size"] = found["moe_intermediate_size"]
    return granite_factors(of) | own


def _nemotron(of: Metadata) -> dict[str, Any]:
    """Keys of a Nemotron-H. The kind of a layer is recognized by its tensors, as not all converters give sizes only for
    layers with an MLP."""
    parts = {"attn_q": ATTENTION, "ssm_in": STATE, "ffn_up": "mlp", "ffn_up_exps": "moe"}
    kinds = [
        next((kind for part, kind in parts.items() if f"blk.{layer}.{part}.weight" in of.tensors), "unknown")
        for layer in range(of.num_layers)
    ]
    inner = of.shape(f"blk.{kinds.index('mlp')}.ffn_up.weight")[0] if "mlp" in kinds else None
    num_heads = of.integer("ssm.time_step_rank")
    own = {
        "num_key_value_heads": max(of.whole_numbers(KV_HEADS)),
        "layer_types": kinds,
        "intermediate_size": inner,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": of.integer("ssm.inner_size") // max(1, num_heads),
        "ssm_state_size": of.integer("ssm.state_size"),
        "n_groups": of.integer("ssm.group_count"),
        "conv_kernel": of.integer("ssm.conv_kernel"),
    }
    if "moe" not in kinds:
        return own
    return own | {
        "n_routed_experts": of.integer("expert_count"),
        "num_experts_per_tok": of.integer("expert_used_count"),
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": of.integer("expert_shared_feed_forward_length"),
        "intermediate_size": inner or of.integer("expert_feed_forward_length"),
        "moe_latent_size": of.integer("moe_latent_size", None),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "norm_topk_prob": of.flag("expert_weights_norm", default=True),
        "n_group": of.integer("expert_group_count", 1),
        "topk_group": of.integer("expert_group_used_count", 1),
    }


def _qwen3_5(of: Metadata) -> dict[str, Any]:
    values = of.integer("ssm.time_step_rank")
    own: dict[str, Any] = {
        "linear_conv_kernel_dim": of.integer("ssm.conv_kernel"),
        "linear_num_key_heads": of.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": of.integer("ssm.state_size"),
        "linear_value_head_dim": of.integer("ssm.inner_size") // max(1, values),
        "full_attention_interval": of.integer("full_attention_interval", 4),
    }
    if (keeps := of.booleans("attention.recurrent_layers")) is not None:
        own["layer_types"] = [STATE if each else ATTENTION for each in keeps[: of.num_layers]]
    return own


def _qwen3_5_moe(of: Metadata) -> dict[str, Any]:
    shared = of.integer("expert_shared_feed_forward_length")
    return experts(of) | _qwen3_5(of) | {"shared_expert_intermediate_size": shared}


def _qwen3_next(of: Metadata) -> dict[str, Any]:
    return _qwen3_5_moe(of) | {"norm_topk_prob": of.flag("expert_weights_norm", default=True)}


def _of_convolutions(_: Metadata) -> Changes:
    return {"shortconv.conv.weight": (CONVOLUTION,)}


def _of_mamba(_: Metadata) -> Changes:
    return {
        "ssm_conv1d.weight": (CONVOLUTION,),
        "ssm_a": (Flat(), LogOfMinus()),
        "ssm_d": (Flat(),),
        "ssm_norm.weight": (Flat(),),  # [groups, elements of a group]
    }


def _of_next(_: Metadata) -> Changes:
    """Changes of Qwen3-Next, which keep the order of value heads."""
    return {
        "ssm_a": (LogOfMinus(),),
        "ssm_conv1d.weight": (CONVOLUTION,),
        "ffn_gate_inp_shexp.weight": (OneMore(axis=0, num_axes=2),),
    }


def _of_delta_net(of: Metadata) -> Changes:
    """Changes of Qwen3.5, which reorder value heads if a key head serves several."""
    keys, values, key_size = (of.integer(f"ssm.{name}") for name in ("group_count", "time_step_rank", "state_size"))
    per_key, size = values // max(1, keys), of.integer("ssm.inner_size") // max(1, values)

    def heads(size: int, start: int = 0, axis: int = 0) -> tuple[Change, ...]:
        return (HeadOrder(axis, start, keys, per_key, size),) if per_key > 1 else ()

    before = 2 * keys * key_size  # Q and K
    return {
        "attn_qkv.weight": heads(size, before),
        "attn_gate.weight": heads(size),
        "ssm_alpha.weight": heads(1),
        "ssm_beta.weight": heads(1),
        "ssm_a": (LogOfMinus(), *heads(1)),
        "ssm_dt.bias": heads(1),
        "ssm_conv1d.weight": (CONVOLUTION, *heads(size, before)),
        "ssm_out.weight": heads(size, axis=1),
        "ffn_gate_inp_shexp.weight": (OneMore(axis=0, num_axes=2),),
    }


HYBRIDS = {
    "lfm2": Architecture("Lfm2ForCausalLM", _lfm2, names.LFM2, _of_convolutions, by_layer=(KV_HEADS,)),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", _lfm2_moe, names.LFM2, _of_convolutions, by_layer=(KV_HEADS,)),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _granite,
        names.GRANITE_HYBRID,
        _of_mamba,
        is_interleaved=True,
        splits_gate_up=True,
        by_layer=(KV_HEADS,),
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM", _nemotron, names.MAMBA, _of_mamba, is_interleaved=True, by_layer=(KV_HEADS, INNER)
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM", _nemotron, names.MAMBA, _of_mamba, is_interleaved=True, by_layer=(KV_HEADS, INNER)
    ),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _qwen3_next, names.QWEN3_NEXT, _of_next, plus_one=True),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _qwen3_5, names.QWEN3_5, _of_delta_net, plus_one=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _qwen3_5_moe, names.QWEN3_5, _of_delta_net, plus_one=True),
}
