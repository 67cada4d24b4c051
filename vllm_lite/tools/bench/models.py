"""Configurations that are served and measured with random weights."""

import json
from pathlib import Path
from typing import Any

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
