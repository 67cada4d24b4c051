"""An image through the tower of Qwen3.5's shape: ours in several forms, and transformers', in turn.

    python benchmarks/tower.py                                     # ours and transformers, 448 x 448
    python benchmarks/tower.py --forms bf16 int8 --images 4 --side 224
    python benchmarks/tower.py --openvino-python PYTHON            # beside OpenVINO, in bf16 and with int8 weights
    python benchmarks/tower.py --llama-python PYTHON --llama-text MODEL.gguf   # beside llama.cpp's mtmd, in three types

Weights are random, the same for all but llama.cpp, with some inputs and channels larger than others, as in trained
towers. Each round runs every way once. The output has the best milliseconds of each, as a share of the speed of
products in registers, which is measured just before, and the error of the vectors: the norm of their difference to ours
in float32, divided by the norm of these. OpenVINO runs in an environment with openvino, nncf, torch and transformers,
on the tower of transformers' code, as its GenAI pipelines do. llama.cpp runs in one with llama-cpp-python and gguf; its
vectors have the text model's size, which changes a hundredth of the work.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limits import Machine

VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
}
TEXT_SIZE = 2048
RUNNERS = Path(__file__).parent / "runners"
ROOT = "model.visual."
Encode = Callable[[], Any]
"""Computes an image's vectors, float [num_vectors, TEXT_SIZE]; returns None for a peer that does not give them."""


def flop(num_patches: int, num_images: int) -> float:
    """Multiplications and additions of products and attention; `num_patches` of each image."""
    size, inner, depth = (int(VISION[name]) for name in ("hidden_size", "intermediate_size", "depth"))
    merged = 4 * size
    per_patch = 4 * size**2 + 2 * size * inner + 2 * num_patches * size
    merger = (merged**2 + merged * TEXT_SIZE) / 4
    patches = 3 * 2 * 16**2 * size
    return 2.0 * num_images * num_patches * (depth * per_patch + merger + patches)


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint with random weights of the tower, and a text model of one small layer."""
    import torch
    from safetensors.torch import save_file

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {
        "hidden_size": TEXT_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
    }
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "image_token_id": 3}
    config["vision_config"] = VISION | {"out_hidden_size": TEXT_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    model = built("bf16", folder)
    slots = {slot.name: slot for group in model.weight_groups() for slot in group.slots}
    save_file(
        {slot.name: weight(slot.name, slot.shape, generator) for slot in slots.values()}, folder / "model.safetensors"
    )


def weight(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    """Random weights: norms with different channels, one in a hundred far larger, biases, and matrices with different
    inputs."""
    import torch

    made = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        made = made.flatten(1)
        made *= (torch.randn(made.shape[1], generator=generator) * 0.3).exp() * made.shape[1] ** -0.5
    elif "norm" in name and name.endswith("weight"):
        made = (made * 0.3).exp()
        made[torch.randint(0, len(made), (max(1, len(made) // 100),), generator=generator)] *= 8
    else:
        made *= 0.02
    return made.view(shape).to(torch.bfloat16)


def built(form: str, folder: Path) -> Any:
    from vllm_lite.checkpoint.config_json import load_spec
    from vllm_lite.models.registry import Sizes, build

    dtype = {"f32": "float32"}.get(form, "bfloat16")
    quantization: Any = form if form == "int8" else None
    return build(load_spec(folder), dtype, "cpu", Sizes(64, 64), quantization)


def ours(form: str, images: list[Any], folder: Path) -> Encode:
    import torch

    from vllm_lite.models.weights import load_weights

    model = built(form, folder)
    load_weights(model, folder)

    def encode() -> Any:
        with torch.inference_mode():
            return torch.cat(model.tower.encode(images)).float()

    return encode


def pixels_of(images: list[Any]) -> Any:
    """Patches like those of transformers' processor: float32 [num_patches, 3 * 2 * 16 * 16]."""
    import torch

    patch, parts = VISION["patch_size"], []
    for image in images:
        rows, cols = image.shape[0] // patch // 2, image.shape[1] // patch // 2
        by_place = ((image.float() / 255 - 0.5) / 0.5).view(rows, 2, patch, cols, 2, patch, 3)
        patches = by_place.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, patch, patch)
        parts.append(patches.expand(-1, -1, 2, -1, -1).flatten(1))
    return torch.cat(parts)


def transformers(images: list[Any], folder: Path) -> Encode:
    import torch
    from safetensors.torch import load_file
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    config = Qwen3_5VisionConfig(**VISION, out_hidden_size=TEXT_SIZE)
    model: Any = Qwen3_5VisionModel(config).eval()
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix(ROOT): own for name, own in stored.items() if name.startswith(ROOT)})
    model.to(torch.bfloat16)
    rows, cols = images[0].shape[0] // 16, images[0].shape[1] // 16
    grid = torch.tensor([[1, rows, cols]] * len(images))
    pixels = pixels_of(images).bfloat16()

    def encode() -> Any:
        with torch.inference_mode():
            return model(pixels, grid_thw=grid).pooler_output.float()

    return encode


def openvino(python: str, kind: str, options: argparse.Namespace, folder: Path) -> Encode:
    import numpy as np
    import torch

    side = str(options.side // VISION["patch_size"])
    sizes = [side, side, str(options.images), str(options.threads), json.dumps(VISION | {"out_hidden_size": TEXT_SIZE})]
    ask = elsewhere("OpenVINO", [python, "-P", str(RUNNERS / "openvino_tower.py"), kind, *sizes, str(folder)])
    vectors = torch.from_numpy(np.load(folder / f"{kind}.npy"))

    def encode() -> Any:
        ask()
        return vectors

    return encode


def mtmd(python: str, kind: str, options: argparse.Namespace) -> Encode:
    sizes = [str(options.side), str(options.images), str(options.threads), json.dumps(VISION), options.llama_text]
    return elsewhere("llama.cpp", [python, "-P", str(RUNNERS / "llama_tower.py"), kind, *sizes])


def elsewhere(name: str, command: list[str]) -> Encode:
    """Start a process that builds the tower; each call asks it for an image."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("pipes were asked for")
    sent, got = process.stdin, process.stdout
    if not any(line.strip() == "ready" for line in got):
        raise SystemExit(f"{name} cannot run the tower")

    def encode() -> None:
        print("go", file=sent, flush=True)
        got.readline()

    return encode


def ways_of(options: argparse.Namespace, images: list[Any], folder: Path) -> dict[str, Encode]:
    ways = {form: ours(form, images, folder) for form in options.forms}
    if not options.no_transformers:
        ways["transformers bf16"] = transformers(images, folder)
    for kind in ("bf16", "int8") if options.openvino_python else ():
        ways[f"OpenVINO {kind}"] = openvino(options.openvino_python, kind, options, folder)
    for kind in ("bf16", "f16", "q8_0") if options.llama_python else ():
        ways[f"llama.cpp {kind}"] = mtmd(options.llama_python, kind, options)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=["bf16", "int8"], choices=["f32", "bf16", "int8"])
    parser.add_argument("--side", type=int, default=448, help="pixels along each edge")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--openvino-python", help="the interpreter of an environment with OpenVINO")
    parser.add_argument("--llama-python", help="the interpreter of an environment with llama-cpp-python and gguf")
    parser.add_argument("--llama-text", help="a text model's file in GGUF, which mtmd wants")
    options = parser.parse_args()
    if options.llama_python and not options.llama_text:
        parser.error("--llama-python wants --llama-text, the file of a text model")
    import numpy as np
    import torch

    from vllm_lite.kernels import cpu

    torch.set_num_threads(options.threads)
    if cpu.available():
        cpu.set_num_threads(options.threads)
    images = [torch.randint(0, 256, (options.side, options.side, 3), dtype=torch.uint8) for _ in range(options.images)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_checkpoint(folder)
        np.save(folder / "pixels.npy", pixels_of(images).numpy())
        exact = ours("f32", images, folder)()
        ways = ways_of(options, images, folder)
    machine = Machine.measured(options.threads)
    times: dict[str, list[float]] = {name: [] for name in ways}
    vectors = {name: encode() for name, encode in ways.items()}
    errors = {name: float((own - exact).norm() / exact.norm()) for name, own in vectors.items() if own is not None}
    for _ in range(options.rounds):
        for name, encode in ways.items():
            start_s = time.perf_counter()
            encode()
            times[name].append(time.perf_counter() - start_s)
    work = flop((options.side // 16) ** 2, options.images)
    first = min(times[options.forms[0]])
    print(f"{options.images} x {options.side} x {options.side}, {options.threads} threads, {work / 1e9:.0f} GFLOP")
    for name, taken in times.items():
        share = f", {work / min(taken) / machine.bfloat16:5.1%} of bfloat16 in registers" if machine else ""
        error = f", error {errors[name]:.4f}" if name in errors else ""
        print(f"{name:18} {1000 * min(taken):8.1f} ms, {min(taken) / first:5.2f} x {options.forms[0]}{share}{error}")


if __name__ == "__main__":
    main()
