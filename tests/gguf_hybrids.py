"""Converts checkpoints with recurrent layers as llama.cpp's converter does: a part of tests/gguf_files.py."""

from typing import Any

import torch

MAMBA = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
DELTA_NET = ("qwen35", "qwen35moe", "qwen3next")


def granite(config: dict[str, Any]) -> dict[str, Any]:
    attends = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    return {
        "attention.head_count_kv": [each * config["num_key_value_heads"] for each in attends],
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def nemotron(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    own = {
        "block_count": len(kinds),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [config["intermediate_size"] * (kind == "mlp") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    if "moe" in kinds:
        own["expert_shared_feed_forward_length"] = config["moe_shared_expert_intermediate_size"]
    return own


def qwen(config: dict[str, Any]) -> dict[str, Any]:
    values = config["linear_num_value_heads"]
    return {
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config["linear_value_head_dim"],
    }


def looked_up(name: str) -> str:
    """The name of a tensor in gguf-py's tables."""
    if ".mixer.experts." in name:
        name = name.replace(".mixer.", ".mlp.").replace("backbone.", "model.")
    return f"{name.removesuffix('.dt_bias')}.dt_proj.bias" if name.endswith(".dt_bias") else name


def split(name: str, tensor: torch.Tensor, *, has_experts: bool) -> dict[str, torch.Tensor]:
    """Split an MLP's gate and up, which are one tensor in the checkpoint."""
    layer, ending = name.split(".")[2], "_shexp" if has_experts else ""
    gate, up = tensor.chunk(2)
    return {f"blk.{layer}.ffn_gate{ending}.weight": gate, f"blk.{layer}.ffn_up{ending}.weight": up}


def changed(tensor: torch.Tensor, part: str, architecture: str, config: dict[str, Any]) -> torch.Tensor:
    """Convert a tensor. `part`: its name in a layer, like "ssm_a"."""
    if part == "ssm_conv1d.weight":
        tensor = tensor.squeeze(1)
    if part == "ssm_a":
        tensor = -tensor.exp()
    if architecture in MAMBA:
        if part in ("ssm_a", "ssm_d"):
            return tensor.unsqueeze(1)
        groups = config["n_groups" if architecture.startswith("nemotron") else "mamba_n_groups"]
        return tensor.view(groups, -1) if part == "ssm_norm.weight" else tensor
    return tensor if architecture == "qwen3next" else _tiled(tensor, part, config)


def _tiled(tensor: torch.Tensor, part: str, config: dict[str, Any]) -> torch.Tensor:
    """Reorder value heads: head i of key head j moves from i + j * n to j + i * keys."""
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        before = 2 * keys * config["linear_key_head_dim"]
        return torch.cat([tensor[:before], _turned(tensor[before:], keys, size)])
    if part == "ssm_out.weight":
        return _turned(tensor.T, keys, size).T.contiguous()
    if part == "attn_gate.weight":
        return _turned(tensor, keys, size)
    return (
        _turned(tensor, keys, 1) if part in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias") else tensor
    )


def _turned(rows: torch.Tensor, keys: int, size: int) -> torch.Tensor:
    by_key = rows.reshape(keys, -1, size, *rows.shape[1:])
    return torch.cat([by_key[:, i].flatten(0, 1) for i in range(by_key.shape[1])])
