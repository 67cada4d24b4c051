"""Tensors that llama.cpp's converter splits or joins, by architecture: a part of tests/gguf_files.py."""

from typing import Any

import torch


def gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata that the converter writes for this architecture in addition to the usual."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = [(config.get("per_layer_config") or {}).get(str(layer), {}) for layer in range(len(slides))]
    full = next(each["head_dim"] for each in own if "head_dim" in each)
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    found = {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if any("num_key_value_heads" in each for each in own):
        heads = [each.get("num_key_value_heads", config["num_key_value_heads"]) for each in own]
        found["attention.head_count_kv"] = heads
    if config.get("use_double_wide_mlp"):
        found["feed_forward_length"] = [inner * (1 + (layer >= len(slides) - shared)) for layer in range(len(slides))]
    if config.get("enable_moe_block"):
        found["expert_used_count"] = config["top_k_experts"]
    return found


def gemma4_factors(config: dict[str, Any]) -> torch.Tensor:
    """Divisor of the rotation frequency of each pair, in heads of full-attention layers."""
    size = gemma4(config)["attention.key_length"]
    turned = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return torch.tensor([1.0] * turned + [1e30] * (size // 2 - turned))


def of(architecture: str, name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """The tensors of the file for the checkpoint's tensor `name`; None if it is not split."""
    if architecture == "gpt-oss" and ".experts." in name:
        return _gpt_oss(name, tensor)
    if name.startswith("pooler."):
        return {}  # converters drop it
    if name == "embeddings.position_embeddings.weight" and config["model_type"] == "roberta":
        return {"position_embd.weight": tensor[config["pad_token_id"] + 1 :]}
    if name.endswith(".sinks"):
        return {f"blk.{name.split('.')[2]}.attn_sinks.weight": tensor}
    if architecture == "gemma4":
        return _gemma4(name, tensor)
    if architecture == "qwen3next" and name.endswith("in_proj_qkvz.weight"):
        return _qwen3_next(name, tensor, config)
    return None


def _qwen3_next(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Split the rows of each key head, which are its Q, its K, and V and z of its value heads."""
    layer, keys, size = name.split(".")[2], config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    rows = tensor.view(keys, 2 * (size + values), -1).split((size, size, values, values), dim=1)
    *mixed, gate = (each.flatten(0, 1) for each in rows)
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(mixed), f"blk.{layer}.attn_gate.weight": gate}


def _gemma4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Map a tensor of the text model; the vision part is in another file. Vectors of the router have names that are no
    weights'."""
    if any(part in name for part in ("vision", "audio")):
        return {}
    endings = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    found = next((theirs for ours, theirs in endings.items() if name.endswith(ours)), None)
    layer = name.partition(".layers.")[2].partition(".")[0]
    return {f"blk.{layer}.{found}": tensor} if found else None


def _gpt_oss(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split and transpose matrices, [experts, inputs, outputs] in the checkpoint, in which gate and up columns
    alternate."""
    layer, ending = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    stored = tensor if ending == "bias" else tensor.transpose(1, 2)  # [experts, outputs, ...]
    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{ending}": stored}
    gate, up = stored[:, ::2], stored[:, 1::2]
    return {f"blk.{layer}.ffn_gate_exps.{ending}": gate, f"blk.{layer}.ffn_up_exps.{ending}": up}
