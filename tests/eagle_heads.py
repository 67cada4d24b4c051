"""EAGLE-3 heads for tiny checkpoints, and such a head in plain torch, from its published description."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu

from tests.checkpoints import transformers_model
from vllm_lite.checkpoint.config_json import load_spec

WIDTH, EPS, THETA = 96, 1e-5, 10000.0


def make_eagle(model: Path, path: Path, num_tokens: int = 40, older: bool = True, **settings: Any) -> Path:
    """Write a random head for the checkpoint in `model`. It can draft `num_tokens` of the model's tokens, and its
    attention has the model's size. `older`: use the names of the paper's own checkpoints."""
    spec = load_spec(model)
    size, vocab, heads = spec.hidden_size, spec.vocab_size, spec.layers[0].attention
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    layer = "midlayer." if older else "layers.0."
    query, shared = heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size
    tensors = {
        "fc.weight": matrix(size, 3 * size),
        f"{layer}hidden_norm.weight": norm(),
        f"{layer}input_layernorm.weight": norm(),
        f"{layer}self_attn.q_proj.weight": matrix(query, 2 * size),
        f"{layer}self_attn.k_proj.weight": matrix(shared, 2 * size),
        f"{layer}self_attn.v_proj.weight": matrix(shared, 2 * size),
        f"{layer}self_attn.o_proj.weight": matrix(size, query),
        f"{layer}post_attention_layernorm.weight": norm(),
        f"{layer}mlp.gate_proj.weight": matrix(WIDTH, size),
        f"{layer}mlp.up_proj.weight": matrix(WIDTH, size),
        f"{layer}mlp.down_proj.weight": matrix(size, WIDTH),
        "norm.weight": norm(),
        "lm_head.weight": matrix(num_tokens, size),
    }
    if num_tokens < vocab:
        known = torch.randperm(vocab, generator=generator)[:num_tokens].sort().values
        tensors["d2t"] = known - torch.arange(num_tokens)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_size,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "vocab_size": vocab,
        "draft_vocab_size": num_tokens,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


class EagleTwin:
    """The head in `path` of the checkpoint in `model`, in plain torch."""

    def __init__(self, model: Path, path: Path, before: tuple[int, int, int]) -> None:
        """`before`: layers of the model whose inputs are the head's hidden states."""
        self.before = before
        spec = load_spec(model)
        self.model = transformers_model(model, spec.architecture).eval()
        self.size = spec.layers[0].attention.head_size
        tensors = load_file(path / "model.safetensors")
        self.of = {name.removeprefix("midlayer.").removeprefix("layers.0."): each for name, each in tensors.items()}
        offsets = self.of.get("d2t")
        self.tokens = torch.arange(len(self.of["lm_head.weight"])) + (0 if offsets is None else offsets)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.of[f"{name}.weight"]

    def heads(self, x: torch.Tensor, name: str, turns: bool = True) -> torch.Tensor:
        """[n, 2 * hidden size] -> [heads, n, size], turned by position."""
        y = (x @ self.of[f"self_attn.{name}.weight"].T).view(len(x), -1, self.size).transpose(0, 1)
        if not turns:
            return y
        angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, self.size, 2) / self.size)
        cos, sin = angles.cos(), angles.sin()
        first, second = y.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def layer(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.norm(embedded, "input_layernorm"), self.norm(before, "hidden_norm")), 1)
        query, key, value = self.heads(x, "q_proj"), self.heads(x, "k_proj"), self.heads(x, "v_proj", turns=False)
        repeats = len(query) // len(key)
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        mixed = scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        y = before + mixed.transpose(0, 1).reshape(len(x), -1) @ self.of["self_attn.o_proj.weight"].T
        z = self.norm(y, "post_attention_layernorm")
        gated = silu(z @ self.of["mlp.gate_proj.weight"].T) * (z @ self.of["mlp.up_proj.weight"].T)
        return y + gated @ self.of["mlp.down_proj.weight"].T

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, unknown: tuple[int, ...] = ()) -> list[int]:
        """The most likely `count` tokens after `tokens`. `unknown`: indexes of tokens whose preceding hidden state was
        unknown."""
        states = self.model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
        joined = torch.cat([states[index][0] for index in self.before], 1) @ self.of["fc.weight"].T
        before = torch.cat((torch.zeros(1, joined.shape[1]), joined[:-1]))
        before[list(unknown)] = 0
        for _ in range(count):
            y = self.layer(self.model.model.embed_tokens(torch.tensor(tokens)), before)
            best = (self.norm(y[-1], "norm") @ self.of["lm_head.weight"].T).argmax()
            tokens = [*tokens, int(self.tokens[best])]
            before = torch.cat((before, y[-1:]))
        return tokens[len(tokens) - count :]
