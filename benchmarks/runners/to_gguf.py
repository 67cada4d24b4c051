"""Writes llama.cpp's MODEL-bf16.gguf beside a Llama checkpoint: python -m runners.to_gguf MODEL

llama.cpp's own converter knows only the tokenizers of published models.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("bench")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field, add in {
        "max_position_embeddings": writer.add_context_length,
        "hidden_size": writer.add_embedding_length,
        "num_hidden_layers": writer.add_block_count,
        "intermediate_size": writer.add_feed_forward_length,
        "num_attention_heads": writer.add_head_count,
        "num_key_value_heads": writer.add_head_count_kv,
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "rope_theta": writer.add_rope_freq_base,
        "vocab_size": writer.add_vocab_size,
    }.items():
        add(config[field])
    for add in (writer.add_rope_dimension_count, writer.add_key_length, writer.add_value_length):
        add(config["head_dim"])


def add_tokenizer(writer: Any, model: dict[str, Any]) -> None:
    words = sorted(model["vocab"], key=model["vocab"].get)
    special = [gguf.TokenType.CONTROL] * 3  # <unk>, <s>, </s>
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(special + [gguf.TokenType.NORMAL] * (len(words) - len(special)))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])


def add_weights(writer: Any, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    def add(name: str, weight: torch.Tensor) -> None:
        if weight.ndim == 1:
            writer.add_tensor(name, weight.float().numpy())
        else:
            rows = weight.contiguous().view(torch.uint16).numpy().view(np.uint8).reshape(len(weight), -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if not config["tie_word_embeddings"]:
        add("output.weight", weights["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        for source, name in NAMES.items():
            weight = weights[f"model.layers.{layer}.{source}.weight"]
            if name in heads:
                weight = interleaved(weight, heads[name])
            add(f"blk.{layer}.{name}.weight", weight)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head, the checkpoint rows that are half a head apart."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    model = Path(sys.argv[1])
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(f"{model}-bf16.gguf", "llama")
    add_config(writer, config)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text())["model"])
    add_weights(writer, load_file(model / "model.safetensors"), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
