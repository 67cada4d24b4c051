"""Writes a Llama checkpoint with random weights: python -m runners.make_model SIZE FOLDER, with a size of SIZES below.

Linear layers are N(0, 1 / inputs) and embeddings N(0, 1), so that every block moves the residual stream and greedy
output does not end in a loop at once.

    python -m runners.make_model medium FOLDER SURENESS

gives the model words that it is sure of, as trained ones are: each token has a successor, in whose row of the LM head
the token's own vector has the weight SURENESS (0 to 1), beside noise. So models of the same weights in fewer bits agree
with it most of the time, which those of random rows do not, and drafts can be tried.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 32_000
SPECIAL = ["<unk>", "<s>", "</s>"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
FIELDS = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
]
SIZES = {
    "small": dict(zip(FIELDS, [384, 6, 6, 2, 1024, 64], strict=True)),  # 34 million parameters
    "medium": dict(zip(FIELDS, [1024, 24, 16, 4, 5120, 64], strict=True)),  # 506 million
    "qwen": dict(zip(FIELDS, [1024, 28, 16, 8, 3072, 128], strict=True)),  # 506 million: layers as of Qwen3-0.6B
    "group6": dict(zip(FIELDS, [1536, 28, 12, 2, 8960, 128], strict=True)),  # 1.4 billion: those of Qwen2.5-1.5B
    "llama1b": dict(zip(FIELDS, [2048, 16, 32, 8, 8192, 64], strict=True)),  # 1.2 billion: all of Llama-3.2-1B
    "group6_mtp": dict(zip(FIELDS, [1536, 28, 12, 2, 8960, 128], strict=True)),  # the same, and an MTP head
    "group6_words": dict(zip(FIELDS, [1536, 28, 12, 2, 8960, 128], strict=True)),  # and the vocabulary of Qwen2.5-1.5B
    "moe": dict(zip(FIELDS, [768, 12, 12, 4, 384, 64], strict=True)),  # 410 million, 85 of them for each token
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
OTHER: dict[str, dict[str, Any]] = {
    "llama1b": {"vocab_size": 128_256, "tie_word_embeddings": True},
    "moe": EXPERTS,
    "group6_mtp": {"mtp_num_hidden_layers": 1},
    "group6_words": {"mtp_num_hidden_layers": 1, "vocab_size": 151_936, "tie_word_embeddings": True},
}
"""A size's settings beside FIELDS that are not those of CONFIG."""
FREQUENT = 20_000
"""Tokens of "group6_words" that it writes: the first ones, as the tokens of a text are mostly the frequent ones."""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """All bytes, then pairs of them, then threes: only token ids are measured, but some engines do not load without a
    tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    twos = [(one, other) for one in letters for other in letters]
    threes = ((one + other, last) for one, other in twos for last in letters)
    pairs = list(itertools.islice(itertools.chain(twos, threes), vocab_size - len(SPECIAL) - len(letters)))
    words = [*SPECIAL, *letters, *(one + other for one, other in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=pairs))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    write_json(folder / "special_tokens_map.json", special)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32_768, **special}
    write_json(folder / "tokenizer_config.json", settings)


def write_weights(folder: Path, config: dict[str, Any], sureness: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, num_layers, heads, kv_heads, inner, head_dim = (int(config[field]) for field in FIELDS)
    vocab_size = int(config["vocab_size"])
    heads, kv_heads = heads * head_dim, kv_heads * head_dim
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        values = torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)
        weights[f"{name}.weight"] = values.to(torch.bfloat16)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)

    if config["tie_word_embeddings"]:
        linear("model.embed_tokens", vocab_size, hidden, 2.0)
        if config.get("mtp_num_hidden_layers"):
            weights["model.embed_tokens.weight"][FREQUENT:] *= 0.5
    else:
        linear("model.embed_tokens", vocab_size, hidden, hidden**0.5)
        linear("lm_head", vocab_size, hidden, 2.0)
        if sureness:
            vectors, rows = weights["model.embed_tokens.weight"].float(), weights["lm_head.weight"].float()
            rows[torch.randperm(vocab_size, generator=generator)] = (
                sureness * vectors * (2.0 / hidden**0.5) + (1 - sureness**2) ** 0.5 * rows
            )
            weights["lm_head.weight"] = rows.to(torch.bfloat16)
    norm("model.norm")
    prefixes = [f"model.layers.{layer}" for layer in range(num_layers)]
    if config.get("mtp_num_hidden_layers"):  # its drafts mean nothing: benchmarks replace them
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            norm(f"mtp.{name}")
        linear("mtp.fc", hidden, 2 * hidden)
        prefixes.append("mtp.layers.0")
    for prefix in prefixes:
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        linear(f"{prefix}.self_attn.q_proj", heads, hidden, 1.5)
        linear(f"{prefix}.self_attn.k_proj", kv_heads, hidden, 1.5)
        linear(f"{prefix}.self_attn.v_proj", kv_heads, hidden)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads)
        blocks = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.get("num_experts", 0))]
        if blocks:
            linear(f"{prefix}.mlp.gate", len(blocks), hidden)
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = torch.ones(head_dim, dtype=torch.bfloat16)
        for block in blocks or [f"{prefix}.mlp"]:
            linear(f"{block}.gate_proj", inner, hidden)
            linear(f"{block}.up_proj", inner, hidden)
            linear(f"{block}.down_proj", hidden, inner)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(size: str, folder: Path, sureness: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {**CONFIG, **SIZES[size], **OTHER.get(size, {})}
    config["tie_word_embeddings"] &= not sureness
    write_tokenizer(folder, config["vocab_size"])
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    write_weights(folder, config, sureness)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:]))
