"""The tower of tower.py in OpenVINO: `python openvino_tower.py KIND ROWS COLS IMAGES THREADS VISION FOLDER`, once for
each line of stdin. KIND is bf16, or int8 for weights that NNCF has made so, as optimum's export does. FOLDER has the
weights, and the images' patches in pixels.npy; the vectors become KIND.npy there."""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
import torch
from safetensors.torch import load_file

ROOT = "model.visual."


class Tower(torch.nn.Module):
    """The model with the sizes of its images fixed, so that it can be traced."""

    def __init__(self, model: torch.nn.Module, grid: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.grid = grid

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(pixels, grid_thw=self.grid).pooler_output
        return made


def main() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    kind, rows, cols, images, threads = sys.argv[1], *map(int, sys.argv[2:6])
    config, folder = Qwen3_5VisionConfig(**json.loads(sys.argv[6])), Path(sys.argv[7])
    grid = torch.tensor([[1, rows, cols]] * images)
    tower = Tower(Qwen3_5VisionModel(config).eval(), grid)
    stored = load_file(folder / "model.safetensors")
    tower.model.load_state_dict({name.removeprefix(ROOT): own for name, own in stored.items() if name.startswith(ROOT)})
    pixels = torch.from_numpy(np.load(folder / "pixels.npy"))
    with torch.inference_mode():
        converted = openvino.convert_model(tower, example_input=pixels)
    if kind == "int8":
        import nncf

        converted = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_ASYM)
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(converted, "CPU", settings)
    request = compiled.create_infer_request()
    given = pixels.numpy()
    np.save(folder / f"{kind}.npy", np.array(request.infer([given])[0]))
    print("ready", flush=True)
    for _ in sys.stdin:
        request.infer([given])
        print("done", flush=True)


if __name__ == "__main__":
    main()
