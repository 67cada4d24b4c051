"""The tower of tower.py in llama.cpp's mtmd: `python llama_tower.py KIND SIDE IMAGES THREADS VISION TEXT`, once for
each line of stdin. KIND is the type of the matrices: bf16, f16 or q8_0. TEXT is a GGUF file of a text model, whose
hidden size the tower's vectors get. Needs llama-cpp-python and gguf."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from llama_cpp import llama_cpp, mtmd_cpp

KINDS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
RANDOM = np.random.default_rng(0)


def matrices(vision: dict[str, Any], text_size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names of the linear layers, with their numbers of outputs and inputs."""
    size, inner = vision["hidden_size"], vision["intermediate_size"]
    for layer in range(vision["depth"]):
        yield f"v.blk.{layer}.attn_qkv", (3 * size, size)
        yield f"v.blk.{layer}.attn_out", (size, size)
        yield f"v.blk.{layer}.ffn_up", (inner, size)
        yield f"v.blk.{layer}.ffn_down", (size, inner)
    yield "mm.0", (4 * size, 4 * size)
    yield "mm.2", (text_size, 4 * size)


def norms(vision: dict[str, Any]) -> Iterator[str]:
    for layer in range(vision["depth"]):
        yield from (f"v.blk.{layer}.ln1", f"v.blk.{layer}.ln2")
    yield "v.post_ln"


def randoms(*shape: int) -> Any:
    return (RANDOM.standard_normal(shape) * 0.02).astype(np.float32)


def write_tower(file: Path, vision: dict[str, Any], kind: str, text_size: int) -> None:
    """Write a file of random weights as llama.cpp's converter makes them of Qwen3-VL."""
    size, patch = vision["hidden_size"], vision["patch_size"]
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    for name, value in {
        "image_size": round(vision["num_position_embeddings"] ** 0.5) * patch,
        "patch_size": patch,
        "embedding_length": size,
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["depth"],
        "projection_dim": text_size,
        "attention.head_count": vision["num_heads"],
        "spatial_merge_size": vision["spatial_merge_size"],
    }.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        writer.add_tensor(name, randoms(size, 3, patch, patch).astype(np.float16))
    writer.add_tensor("v.patch_embd.bias", randoms(size))
    writer.add_tensor("v.position_embd.weight", randoms(vision["num_position_embeddings"], size))
    for name in norms(vision):
        writer.add_tensor(f"{name}.weight", 1 + randoms(size))
        writer.add_tensor(f"{name}.bias", randoms(size))
    for name, (outputs, inputs) in matrices(vision, text_size):
        # Rows of other lengths than whole blocks stay in 16 bits, as converters leave them.
        own = KINDS["f16"] if kind == "q8_0" and inputs % 32 else KINDS[kind]
        writer.add_tensor(f"{name}.weight", quantize(randoms(outputs, inputs), own), raw_dtype=own)
        writer.add_tensor(f"{name}.bias", randoms(outputs))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Tower:
    """Encodes the same images again and again."""

    def __init__(self, file: Path, model: Any, side: int, count: int, threads: int) -> None:
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings = False, threads, False
        context = mtmd_cpp.mtmd_init_from_file(str(file).encode(), model, params)
        if not context:
            raise SystemExit("mtmd does not read the tower")
        self._context = context
        pixels = RANDOM.integers(0, 256, (side, side, 3), dtype=np.uint8).tobytes()
        image = mtmd_cpp.mtmd_bitmap_init(side, side, (mtmd_cpp.c_uint8 * len(pixels)).from_buffer_copy(pixels))
        marker = mtmd_cpp.mtmd_default_marker()
        text = mtmd_cpp.mtmd_input_text(marker, len(marker), True, True)
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        images = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(image)
        if mtmd_cpp.mtmd_tokenize(context, chunks, mtmd_cpp.byref(text), images, 1):
            raise SystemExit("mtmd does not take the image")
        every = [mtmd_cpp.mtmd_input_chunks_get(chunks, i) for i in range(mtmd_cpp.mtmd_input_chunks_size(chunks))]
        image_type = mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE
        self._chunks = [each for each in every if mtmd_cpp.mtmd_input_chunk_get_type(each) == image_type] * count

    def encode(self) -> None:
        for chunk in self._chunks:
            if mtmd_cpp.mtmd_encode_chunk(self._context, chunk):
                raise SystemExit("mtmd failed")


def main() -> None:
    kind, side, count, threads = sys.argv[1], *map(int, sys.argv[2:5])
    vision, text = json.loads(sys.argv[5]), sys.argv[6]
    said, sys.stderr = os.dup(1), os.fdopen(os.dup(2), "w")
    for own in (1, 2):  # of llama.cpp, which says much
        os.dup2(os.open(os.devnull, os.O_WRONLY), own)
    model = llama_cpp.llama_model_load_from_file(text.encode(), llama_cpp.llama_model_default_params())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mmproj.gguf")
        write_tower(file, vision, kind, llama_cpp.llama_model_n_embd(model))
        tower = Tower(file, model, side, count, threads)
    tower.encode()
    with os.fdopen(said, "w") as answers:
        print("ready", file=answers, flush=True)
        for _ in sys.stdin:
            tower.encode()
            print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
