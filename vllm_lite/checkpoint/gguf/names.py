"""Names of tensors in GGUF files, and their names in models."""

import re
from collections.abc import Mapping

TOP = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "word_embeddings_layernorm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""Names within a layer, with the prefix "blk.N." in the file and "model.layers.N." in models. A name with {} stands for
the matrices of all experts, or heads, in one tensor."""
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms of layers that also have norms after their blocks, such as Gemma 2's."""
GEMMA4 = SANDWICH | {
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.scale": "mlp.gate.scale",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
FUSED_GATE = {"ffn_up": "mlp.gate_up_proj"}
SINGLE_NORM = {"post_attention_norm": "post_attention_layernorm"}
GPT_OSS = SINGLE_NORM | {"attn_sinks.weight": "self_attn.sinks"}
STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GPT2 = {
    "output_norm": "ln_f",
    "attn_norm": "h.{layer}.ln_1",
    "attn_qkv": "h.{layer}.attn.c_attn",
    "attn_output": "h.{layer}.attn.c_proj",
    "ffn_norm": "h.{layer}.ln_2",
    "ffn_up": "h.{layer}.mlp.c_fc",
    "ffn_down": "h.{layer}.mlp.c_proj",
}
BLOOM = {
    "output_norm": "ln_f",
    "attn_norm": "h.{layer}.input_layernorm",
    "attn_qkv": "h.{layer}.self_attention.query_key_value",
    "attn_output": "h.{layer}.self_attention.dense",
    "ffn_norm": "h.{layer}.post_attention_layernorm",
    "ffn_up": "h.{layer}.mlp.dense_h_to_4h",
    "ffn_down": "h.{layer}.mlp.dense_4h_to_h",
}
"""Names of BLOOM and Falcon."""
FALCON_TWO_NORMS = BLOOM | {"attn_norm": "h.{layer}.ln_mlp", "attn_norm_2": "h.{layer}.ln_attn"}
GPT_NEOX = {
    "output_norm": "model.final_layer_norm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Parts of Mamba-2. A key with an ending is a whole name within a layer, and so is its value."""
GRANITE_HYBRID = MAMBA | {
    "ffn_gate": "mlp.shared_experts.gate_proj",
    "ffn_up": "mlp.shared_experts.up_proj",
    "ffn_down": "mlp.shared_experts.down_proj",
}
QWEN3_5 = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
QWEN3_NEXT = QWEN3_5 | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
"""Files of the first converters have ssm_in; later ones have Qwen3.5's tensors."""
DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b_proj.{}",
    "attn_v_b": "self_attn.v_b_proj.{}",
}
READ_ASIDE = re.compile(r"(?:blk\.\d+\.)?(?:rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)\.weight")
"""Tensors that become numbers in config.json, or are not needed."""
ENDINGS = ("weight", "bias")
SCALE = ".scale"
_SCALES = re.compile(rf"(?:blk\.\d+\.)?\w+(?:\{SCALE}|\.input_scale)")
"""Scales of NVFP4 matrices, which `checkpoint` reads, and of inputs, which are ignored as no product here quantizes
inputs to NVFP4."""
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.([\w.]{1,100})")


def name_here(stored: str, own: Mapping[str, str]) -> str | None:
    """The model's name of the tensor `stored`; None if it is not a weight. `own`: names specific to the architecture.
    An unknown name is kept, and never requested."""
    if READ_ASIDE.fullmatch(stored):
        return None
    if found := _IN_LAYER.fullmatch(stored):
        layer, rest = found.groups()
        if rest in own:
            return f"model.layers.{layer}.{own[rest]}"
        if _SCALES.fullmatch(rest):
            return None
        part, _, ending = rest.rpartition(".")
        if ending not in ENDINGS:
            return stored
        if part == "exp_probs_b":
            return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        name = own.get(part) or LAYER.get(part)
        if part.startswith("nextn."):
            return f"model.layers.{layer}.{part}.{ending}"  # a layer that is not read
        if name is None:
            return stored
        whole = name.replace("{layer}", layer) if "{layer}" in name else f"model.layers.{layer}.{name}"
        return f"{whole}.{ending}"
    if _SCALES.fullmatch(stored):
        return None
    part, _, ending = stored.rpartition(".")
    name = own.get(part) or TOP.get(part)
    return stored if name is None else f"{name}.{ending}"


def halves(name: str) -> tuple[str, ...]:
    """The names of the matrices stacked in an expert's gate_up tensor; the name alone for any other tensor."""
    both = ".experts.{}.gate_up_proj"
    return (
        tuple(name.replace(both, f".experts.{{}}.{part}") for part in ("gate_proj", "up_proj"))
        if both in name
        else (name,)
    )


def in_layer(stored: str) -> str:
    """The name of a tensor within its layer; the whole name of a tensor outside of layers."""
    found = _IN_LAYER.fullmatch(stored)
    return stored if found is None else found[2]
