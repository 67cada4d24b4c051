"""Prefill and decode speed of one hybrid shape in one engine: ours, transformers or llama.cpp, with random weights.

    python benchmarks/hybrid_speed.py --shape lfm2 --engine ours
    python benchmarks/hybrid_speed.py --shape lfm2 --write lfm2.gguf        # for llama.cpp, once
    python benchmarks/hybrid_speed.py --shape lfm2 --engine llama --gguf lfm2.gguf

An engine is imported when it is asked for, so each may have an environment of its own. All compute in bfloat16, with
two threads. "prefill" is the time to the first token of a prompt that nobody has seen, "decode" that of each further
one, of the best of `--rounds`.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 2
QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 4608,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 16,
    "layer_types": ["full_attention" if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)],
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "shared_intermediate_size": 2048,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 32,
    "layer_types": ["attention" if index in (10, 13, 17, 27) else "mamba" for index in range(32)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "attention_multiplier": 0.0156,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.246,
    "logits_scaling": 3.0,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
}
COMMON = {"max_position_embeddings": 65536, "eos_token_id": 2, "dtype": "bfloat16", "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {"qwen3.5": QWEN | COMMON, "lfm2": LFM2 | COMMON, "granite": GRANITE | COMMON}
"""Qwen3.5-0.8B but for its vocabulary, LFM2-350M and Granite-4.0-H-350M."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5")
    parser.add_argument("--engine", choices=["ours", "transformers", "llama"])
    parser.add_argument("--write", help="write the GGUF file of the shape")
    parser.add_argument("--gguf", help="the file that llama.cpp runs")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=32, help="decoded behind each prompt")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.write:
        write_gguf(options.write, SHAPES[options.shape])
        return
    length = max(options.lengths) + options.tokens + 64
    run = {"ours": ours, "transformers": transformers, "llama": llama}[options.engine]
    generate = run(SHAPES[options.shape], length, options.gguf)
    generate(prompt(64, 0), 8)
    for size in options.lengths:
        rounds = [generate(prompt(size, number), options.tokens) for number in range(options.rounds)]
        first_s = min(each[0] for each in rounds)
        token_s = min((each[1] - each[0]) / (options.tokens - 1) for each in rounds)
        print(
            f"{options.shape} {options.engine} {size:6} tokens: first token {first_s:7.3f} s = {size / first_s:6.0f} "
            f"tokens/s, then {1000 * token_s:6.2f} ms a token = {1 / token_s:5.1f} tokens/s",
            flush=True,
        )


def prompt(size: int, seed: int) -> list[int]:
    source = random.Random(seed + 1000 * size)
    return [source.randrange(3, 32000) for _ in range(size)]


Generate = Callable[[list[int], int], tuple[float, float]]
"""A prompt and how many tokens -> seconds to the first, and to the last."""


def ours(config: dict[str, Any], length: int, _: str | None) -> Generate:
    from vllm_lite import LLM, SamplingParams
    from vllm_lite.client.prompt import TokensPrompt

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = LLM(folder, load_format="dummy", max_model_len=length, max_num_seqs=4, enable_prefix_caching=False)

    def generate(ids: list[int], count: int) -> tuple[float, float]:
        times = []
        for number in (1, count):
            params = SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True)
            start_s = time.perf_counter()
            llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
            times.append(time.perf_counter() - start_s)
        return times[0], times[1]

    return generate


def transformers(config: dict[str, Any], _: int, __: str | None) -> Generate:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    own = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "dtype")}
    made = AutoConfig.for_model(config["model_type"], **own)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()

    def generate(ids: list[int], count: int) -> tuple[float, float]:
        with torch.inference_mode():
            start_s = time.perf_counter()
            out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            first_s = time.perf_counter() - start_s
            for _ in range(count - 1):
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
            return first_s, time.perf_counter() - start_s

    return generate


def llama(config: dict[str, Any], length: int, gguf: str | None) -> Generate:
    import llama_cpp as lib
    import numpy as np

    model = lib.llama_model_load_from_file((gguf or "").encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = (length + 255) // 256 * 256, 2048, 512
    params.n_threads = params.n_threads_batch = THREADS
    context = lib.llama_init_from_model(model, params) if model else None
    if not context:
        raise SystemExit(f"llama.cpp cannot run {gguf}")
    size = config["vocab_size"]

    def decode(ids: list[int]) -> int:
        tokens = (lib.llama_token * len(ids))(*ids)
        if lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama_decode failed")
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(size,)).argmax())

    def generate(ids: list[int], count: int) -> tuple[float, float]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        start_s = time.perf_counter()
        for begin in range(0, len(ids), 2048):
            token = decode(ids[begin : begin + 2048])
        first_s = time.perf_counter() - start_s
        for _ in range(count - 1):
            token = decode([token])
        return first_s, time.perf_counter() - start_s

    return generate


ARCHITECTURES = {"qwen3_5_text": "qwen35", "lfm2": "lfm2", "granitemoehybrid": "granitehybrid"}


def write_gguf(path: str, config: dict[str, Any]) -> None:
    """Random weights under the names and in the shapes that llama.cpp expects of the family."""
    import gguf
    import numpy as np

    kind, size = config["model_type"], config["hidden_size"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    source = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        """Matrices are bfloat16, all else float32, as llama.cpp's converter has them."""
        values = source.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        if len(shape) == 1 or "conv" in name or name.endswith(("ssm_a", "ssm_d", "norm.weight")):
            writer.add_tensor(name, values if "norm" not in name else values + 1)
        else:
            halves = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            writer.add_tensor(name, halves, raw_dtype=gguf.GGMLQuantizationType.BF16)

    attends = [each in ("full_attention", "attention") for each in config["layer_types"]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or size // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(size)
    writer.add_block_count(len(attends))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads if kind == "qwen3_5_text" else [kv_heads * each for each in attends])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    add("token_embd.weight", config["vocab_size"], size)
    add("token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight", size)
    own = {"qwen3_5_text": add_qwen, "lfm2": add_lfm2, "granitemoehybrid": add_granite}[kind]
    own(writer, config, add, attends)
    for layer, has_attention in enumerate(attends):
        blk = f"blk.{layer}."
        add(f"{blk}attn_norm.weight", size)
        add(f"{blk}post_attention_norm.weight" if kind == "qwen3_5_text" else f"{blk}ffn_norm.weight", size)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{blk}{name}.weight", config["intermediate_size"], size)
        add(f"{blk}ffn_down.weight", size, config["intermediate_size"])
        if has_attention:
            add(f"{blk}attn_q.weight", heads * head * (2 if kind == "qwen3_5_text" else 1), size)
            for name in ("attn_k", "attn_v"):
                add(f"{blk}{name}.weight", kv_heads * head, size)
            add(f"{blk}attn_output.weight", size, heads * head)
            if kind != "granitemoehybrid":
                add(f"{blk}attn_q_norm.weight", head)
                add(f"{blk}attn_k_norm.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_qwen(writer: Any, config: dict[str, Any], add: Callable[..., None], attends: list[bool]) -> None:
    size, keys = config["hidden_size"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    num_values = config["linear_num_value_heads"]
    values = num_values * config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_values)
    writer.add_ssm_inner_size(values)
    writer.add_uint32("qwen35.full_attention_interval", attends.index(True) + 1)
    writer.add_rope_dimension_count(config["head_dim"] // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    for layer in (index for index, each in enumerate(attends) if not each):
        blk = f"blk.{layer}."
        add(f"{blk}attn_qkv.weight", 2 * keys + values, size)
        add(f"{blk}attn_gate.weight", values, size)
        add(f"{blk}ssm_conv1d.weight", 2 * keys + values, config["linear_conv_kernel_dim"])
        add(f"{blk}ssm_dt.bias", num_values)
        add(f"{blk}ssm_a", num_values)
        add(f"{blk}ssm_norm.weight", config["linear_value_head_dim"])
        add(f"{blk}ssm_beta.weight", num_values, size)
        add(f"{blk}ssm_alpha.weight", num_values, size)
        add(f"{blk}ssm_out.weight", size, values)


def add_lfm2(writer: Any, config: dict[str, Any], add: Callable[..., None], attends: list[bool]) -> None:
    size = config["hidden_size"]
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    for layer in (index for index, each in enumerate(attends) if not each):
        add(f"blk.{layer}.shortconv.conv.weight", size, config["conv_L_cache"])
        add(f"blk.{layer}.shortconv.in_proj.weight", 3 * size, size)
        add(f"blk.{layer}.shortconv.out_proj.weight", size, size)


def add_granite(writer: Any, config: dict[str, Any], add: Callable[..., None], attends: list[bool]) -> None:
    size, heads, state = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_state"]
    inner = heads * config["mamba_d_head"]
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_dimension_count(size // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    for layer in (index for index, each in enumerate(attends) if not each):
        blk = f"blk.{layer}."
        add(f"{blk}ssm_in.weight", 2 * inner + 2 * state + heads, size)
        add(f"{blk}ssm_conv1d.weight", inner + 2 * state, config["mamba_d_conv"])
        add(f"{blk}ssm_conv1d.bias", inner + 2 * state)
        add(f"{blk}ssm_dt.bias", heads)
        add(f"{blk}ssm_a", heads, 1)
        add(f"{blk}ssm_d", heads, 1)
        add(f"{blk}ssm_norm.weight", 1, inner)
        add(f"{blk}ssm_out.weight", size, inner)


if __name__ == "__main__":
    main()
