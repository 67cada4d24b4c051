"""What llama.cpp's converter makes several tensors of, by architecture: a part of tests/gguf_files.py."""

from typing import Any

import torch


def of(architecture: str, name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """The file's tensors of the checkpoint's tensor `name`; None for one that remains one."""
    if architecture == "gpt-oss" and ".experts." in name:
        return _gpt_oss(name, tensor)
    if name.startswith("pooler."):
        return {}  # converters drop it
    if name == "embeddings.position_embeddings.weight" and config["model_type"] == "roberta":
        return {"position_embd.weight": tensor[config["pad_token_id"] + 1 :]}
    if name.endswith(".sinks"):
        return {f"blk.{name.split('.')[2]}.attn_sinks.weight": tensor}
    if architecture == "qwen3next" and name.endswith("in_proj_qkvz.weight"):
        return _qwen3_next(name, tensor, config)
    return None


def _qwen3_next(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Rows of a key head are its Q, its K, and V and z of its value heads."""
    layer, keys, size = name.split(".")[2], config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    rows = tensor.view(keys, 2 * (size + values), -1).split((size, size, values, values), dim=1)
    *mixed, gate = (each.flatten(0, 1) for each in rows)
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(mixed), f"blk.{layer}.attn_gate.weight": gate}


def _gpt_oss(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Matrices are [experts, inputs, outputs] in the checkpoint; columns of gate and up lie in turn."""
    layer, ending = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    stored = tensor if ending == "bias" else tensor.transpose(1, 2)  # [experts, outputs, ...]
    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{ending}": stored}
    gate, up = stored[:, ::2], stored[:, 1::2]
    return {f"blk.{layer}.ffn_gate_exps.{ending}": gate, f"blk.{layer}.ffn_up_exps.{ending}": up}
