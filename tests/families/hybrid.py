"""Checkpoints of families with mostly recurrent layers and some attention."""

from typing import Any

import msgspec

from tests.families.variant import NO_WINDOW, Control, Variant, drop, drop_in, drop_in_layers, routing
from vllm_lite.checkpoint.model_spec import LayerSpec, NormSpec

RECURRENT = {
    "initializer_range": 0.1,  # at 0.3 the two forms in transformers itself differ by 1e-3
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
}
"""Heads that fill no vector, and three value heads to a key head."""
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
}


CONTROLS: dict[str, Control] = {
    "rotated part": drop_in("rope", rotary_size=16),
    "norm": drop(norm=NormSpec(1e-6, "wide rms")),
}


def qwen(name: str, kind: str, controls: dict[str, Control], settings: dict[str, Any]) -> Variant:
    return Variant(name, f"{kind}TextConfig", f"{kind}ForCausalLM", RECURRENT | settings, controls)


LFM2 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_multiple_of": 8,
    "conv_L_cache": 3,
}

GRANITE = {
    "initializer_range": 0.1,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "shared_intermediate_size": 36,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "mamba_d_state": 25,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "num_experts_per_tok": 0,
}


SOME_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}


def granite(name: str, **settings: Any) -> Variant:
    controls = {"residual scale": drop(residual_scale=1.0)}
    return Variant(name, "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE | settings, controls)


NEMOTRON = {
    "initializer_range": 0.1,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "ssm_state_size": 25,
    "mamba_num_heads": 8,
    "mamba_head_dim": 20,
    "n_groups": 2,
    "chunk_size": 16,
    "rescale_prenorm_residual": False,
}
NEMOTRON_MOE = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 26,
    "routed_scaling_factor": 2.5,
}


def nemotron(name: str, **settings: Any) -> Variant:
    controls = {"activation": drop(activation="relu"), "norm": drop(norm=NormSpec(1e-5, "layer"))}
    return Variant(name, "NemotronHConfig", "NemotronHForCausalLM", NEMOTRON | settings, controls)


def next_(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    settings = RECURRENT | EXPERTS | settings
    return Variant(name, "Qwen3NextConfig", "Qwen3NextForCausalLM", settings, controls)


def lfm2_moe(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "routed_scaling_factor": 1.4}
    return Variant(name, "Lfm2MoeConfig", "Lfm2MoeForCausalLM", LFM2 | own | settings, controls)


def lfm3(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own: dict[str, Any] = {"conv_L_cache": 5, "sliding_window": 21, "head_dim": 32, "pad_token_id": 0}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    own["layer_types"] = ["conv", "full_attention", "conv", "sliding_attention", "full_attention"]
    own |= settings
    own["num_hidden_layers"] = len(own["layer_types"])
    return Variant(name, "Lfm3Config", "Lfm3ForCausalLM", own, controls)


def falcon_h1(name: str, controls: dict[str, Control], **settings: Any) -> Variant:
    own: dict[str, Any] = {"initializer_range": 0.1, "num_hidden_layers": 3, "pad_token_id": 0}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_ssm": 80, "mamba_n_heads": 4}
    own |= {"mamba_d_state": 25, "mamba_n_groups": 2, "mamba_chunk_size": 16, "time_step_limit": [0.0, 100.0]}
    return Variant(name, "FalconH1Config", "FalconH1ForCausalLM", own | settings, controls)


def scale_of_scores(layer: LayerSpec) -> LayerSpec:
    """The usual one."""
    attention = msgspec.structs.replace(layer.attention, scale=layer.attention.head_size**-0.5)
    return msgspec.structs.replace(layer, attention=attention)


def mamba2(name: str, **settings: Any) -> Variant:
    own: dict[str, Any] = {"num_heads": 4, "head_dim": 32, "state_size": 25, "n_groups": 1, "chunk_size": 16}
    own |= {"initializer_range": 0.1}
    own["time_step_limit"] = [0.0, 100.0]  # transformers writes an infinity that it cannot read
    controls = {"eps": drop(norm=NormSpec(0.5))}
    return Variant(name, "Mamba2Config", "Mamba2ForCausalLM", own | settings, controls)


VARIANTS = [
    qwen("qwen3.5", "Qwen3_5", CONTROLS, {}),
    qwen("qwen3.5-moe", "Qwen3_5Moe", {}, EXPERTS | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    granite("granite-hybrid"),
    granite("granite-hybrid-moe", intermediate_size=22, position_embedding_type="rope", **SOME_EXPERTS),
    nemotron("nemotron-h"),
    nemotron("nemotron-h-moe", **NEMOTRON_MOE),
    Variant("lfm2", "Lfm2Config", "Lfm2ForCausalLM", LFM2),
    lfm2_moe("lfm2-moe", {"sum": routing(renormalize=False), "scale": routing(scale=1.0)}),
    lfm2_moe("lfm2-moe-no-bias", {}, use_expert_bias=False, norm_topk_prob=False, num_dense_layers=1),
    lfm3("lfm3", {"window": NO_WINDOW, "halves": drop_in("rope", scaling=None)}),
    lfm3("lfm3-no-gate", {}, use_attention_gate=False, layer_types=["conv", "sliding_attention", "conv"]),
    falcon_h1(
        "falcon-h1",
        {
            "scale of scores": drop_in_layers(scale_of_scores),
            "attention": drop(attention_scale=1.0),
            "gate": drop(gate_scale=1.0),
            "MLP": drop(residual_scale=1.0),
            "parts": drop_in("recurrent", factors=None),
            "output": drop_in("recurrent", output_factor=1.0),
        },
        lm_head_multiplier=0.5,
        embedding_multiplier=3.0,
        mlp_multipliers=[0.4, 1.8],
        key_multiplier=0.3,
        attention_in_multiplier=1.4,
        attention_out_multiplier=0.6,
        ssm_multipliers=[2.5, 2.0, 3.0, 3.5, 0.4],
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=1.7,
    ),
    falcon_h1("falcon-h1-normed", {}, mamba_rms_norm=True, mamba_norm_before_gate=False, tie_word_embeddings=True),
    mamba2("mamba2"),
    mamba2("mamba2-tied", tie_word_embeddings=True, head_dim=16, num_heads=8, conv_kernel=3),
    next_("qwen3-next", CONTROLS | {"sum": routing(renormalize=False)}),
    next_("qwen3-next-some", {}, norm_topk_prob=False, mlp_only_layers=[1], tie_word_embeddings=True),
]
