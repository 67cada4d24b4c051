"""LoRA adapters of a model with random matrices, for measuring: every linear layer that can be adapted is."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.lora import CONFIG_FILE, WEIGHTS_FILE
from vllm_lite.layers.weights.lora import AdapterLimits, Adapters
from vllm_lite.models.registry import Sizes, build


def write_adapters(model: str, folder: Path, count: int, rank: int) -> list[Path]:
    """Write `count` adapters of `rank` for the model in the folder `model` to folders in `folder`. They are small, so
    that what is computed stays as it is."""
    adapters = Adapters(AdapterLimits(1, rank), 1, torch.bfloat16, torch.device("cpu"))
    built = build(load_spec(model), torch.bfloat16, "cpu", Sizes(1, 1, adapters))
    list(built.weight_groups())  # as they ask for their weights layers say what they are called
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
