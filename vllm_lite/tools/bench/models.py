"""Model configurations for benchmarks with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.lora import CONFIG_FILE, WEIGHTS_FILE
from vllm_lite.layers.weights.lora import AdapterLimits, Adapters
from vllm_lite.models.registry import Sizes, build

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "random-100m": _LLAMA
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "random-500m": _LLAMA
    | {
        "hidden_size": 1024,
        "intermediate_size": 5120,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
}


def write_config(name: str, folder: str) -> None:
    """Write config.json into `folder`: a checkpoint without weights, for load_format "dummy"."""
    Path(folder, "config.json").write_text(json.dumps(RANDOM_MODELS[name]))


# ---- Random LoRA adapters for benchmarks, on every linear layer that can be adapted


def write_adapters(model: str, folder: Path, count: int, rank: int) -> list[Path]:
    """Write `count` adapters of `rank` for the model in the folder `model` to subfolders of `folder`. Their weights are
    small, so that the outputs hardly change."""
    adapters = Adapters(AdapterLimits(1, rank), 1, torch.bfloat16, torch.device("cpu"))
    built = build(load_spec(model), torch.bfloat16, "cpu", Sizes(1, 1, adapters))
    list(built.weight_groups())  # layers register their names when they ask for weights
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    paths = []
    for number in range(count):
        paths.append(folder / f"adapter-{number}")
        paths[-1].mkdir()
        (paths[-1] / CONFIG_FILE).write_text(json.dumps(config))
        tensors = {}
        for name, site in adapters.sites.items():
            outputs = site.shape.outputs[site.names.index(name)].total
            shapes = {"A": (rank, site.shape.inputs.total), "B": (outputs, rank)}
            for matrix, shape in shapes.items():
                values = torch.randn(shape, dtype=torch.float32).mul_(0.01)
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values.to(torch.bfloat16)
        save_file(tensors, paths[-1] / WEIGHTS_FILE)
    return paths
