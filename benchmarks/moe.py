"""Decoding with a mixture of experts with random weights: bytes read by a layer of experts and a whole step, and speed.

    python benchmarks/moe.py --shape qwen3-30b-a3b --layers 4 --streams 1,8,32

The shapes are those of the models, with fewer layers. A step must read the experts that its tokens chose and all dense
weights. The share compares the speed of this with the speed at which as many threads read memory.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from micro import kernels_experts, step

COMMON = {
    "hidden_act": "silu",
    "hidden_size": 2048,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_theta": 1e6,
    },
    "qwen3-coder-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "head_dim": 256,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "partial_rotary_factor": 0.25,
        "rope_theta": 5e6,
        "shared_expert_intermediate_size": 512,
    },
}
FORMS = ("int4", "int4_g32", "int8")


def main() -> int:
    """Print a line for each number of tokens of a layer, and a table for each number of streams of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4, help="[4]; a quarter of those of qwen3-coder-next attend")
    parser.add_argument("--form", choices=FORMS, default="int4_g32", help="of weights [int4_g32]")
    parser.add_argument("--streams", default="1", help="such as 1,8,32 [1]; the model is made anew for each")
    parser.add_argument("--threads", type=int, default=2, help="[2]")
    parser.add_argument("--parts", default="layer,step", help="[layer,step]")
    arguments = parser.parse_args()
    if arguments.layers < 1 or arguments.threads < 1:
        parser.error("--layers and --threads must be at least 1")
    streams = arguments.streams.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in streams):
        parser.error(f"--streams must be numbers like 1,8,32, got {arguments.streams!r}")
    config = COMMON | SHAPES[arguments.shape] | {"num_hidden_layers": arguments.layers}
    if "layer" in arguments.parts:
        _show_layer(config, arguments.form, arguments.threads)
    if "step" in arguments.parts:
        for number in streams:
            _show_step(config, arguments.form, int(number), arguments.threads)
    return 0


def _show_layer(config: dict[str, Any], form: Any, num_threads: int) -> None:
    names = "hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"
    shape = kernels_experts.Shape(*(config[name] for name in names))
    for row in kernels_experts.measure(num_threads, forms=(form, "q4_k"), shape=shape):
        read = f"{row['us']:.0f} us, {row['gb_s']:.1f} of {row['limit']:.1f} GB/s, {100 * row['share']:.0f} %"
        sys.stdout.write(f"{row['kernel']}, {row['shape']}: {read}\n")


def _show_step(config: dict[str, Any], form: str, num_streams: int, num_threads: int) -> None:
    with tempfile.TemporaryDirectory(prefix="vl-moe-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        settings = {
            "load_format": "dummy",
            "quantization": form,
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "cpu_threads": num_threads,
        }
        sys.stdout.write(step.table(step.run(folder, num_streams, 192, 64, settings)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
