"""An invented family: Llama with layers that have different heads. Its reader, a tiny checkpoint, and a reference in
plain torch."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import torch
from msgspec import Meta
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.paged import Oracle
from vllm_lite.checkpoint import config_json
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.families import llama
from vllm_lite.checkpoint.families.common import Family, rope_of
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerSpec, ModelSpec
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.models import registry

ARCHITECTURE = "MixedHeadsForCausalLM"
Heads = tuple[int, int, int, int | None]
"""num_heads, num_kv_heads, head_size, window."""
FULL, SLIDING = (6, 2, 24, None), (3, 1, 40, 11)
LAYERS: tuple[Heads, ...] = (FULL, SLIDING, FULL, SLIDING, SLIDING, SLIDING)
"""Windows and heads of the layers. On two ranks, each rank has one KV head of full layers, and both have the only KV
head of sliding layers, for 2 query heads and for 1."""


class MixedConfig(llama.LlamaConfig, kw_only=True):
    layer_heads: Annotated[list[Heads], Meta(min_length=1)]


def _read(architecture: str, raw: MixedConfig) -> ModelSpec:
    layers = tuple(
        LayerSpec(
            AttentionSpec(heads, kv_heads, size, scale=size**-0.5, window=window),
            rope_of(raw, size) if index % 2 == 0 else msgspec.structs.replace(rope_of(raw, size), theta=500.0),
        )
        for index, (heads, kv_heads, size, window) in enumerate(raw.layer_heads)
    )
    return llama.llama_like(architecture, raw, layers)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the family in this process."""
    monkeypatch.setitem(config_json.FAMILIES, ARCHITECTURE, "llama")
    monkeypatch.setitem(llama.FAMILIES, ARCHITECTURE, Family(MixedConfig, _read))
    monkeypatch.setitem(registry.MODELS, ARCHITECTURE, "vllm_lite.models.llama:Llama")


def make_mixed(path: Path, layers: tuple[Heads, ...] = LAYERS) -> Path:
    """Write the checkpoint to the folder `path` and return it."""
    make_checkpoint(path, num_hidden_layers=len(layers), vocab_size=VOCAB_SIZE)
    raw = json.loads((path / "config.json").read_text())
    own = {"architectures": [ARCHITECTURE], "layer_heads": layers}
    (path / "config.json").write_text(json.dumps(raw | own))
    weights, random = load_file(path / SINGLE_FILE), torch.Generator().manual_seed(11)
    for index, (heads, kv_heads, size, _) in enumerate(layers):
        hidden = raw["hidden_size"]
        shapes = {
            "q_proj": (heads * size, hidden),
            "k_proj": (kv_heads * size, hidden),
            "v_proj": (kv_heads * size, hidden),
            "o_proj": (hidden, heads * size),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{index}.self_attn.{name}.weight"] = 0.3 * torch.randn(shape, generator=random)
    save_file(weights, path / SINGLE_FILE)
    return path


class MixedOracle(Oracle):
    """The checkpoint's logits by loops over layers and heads, in float64 and without a cache, and our model loaded from
    it."""

    def __init__(self, path: Path, dtype: str = "float32", world: int = 1) -> None:
        """`world`: the number of ranks that share our model."""
        self.path, self.dtype, self.max_model_len = path, dtype, 256
        self.spec = load_spec(path).shared_by(world)
        self.weights = {name: tensor.double() for name, tensor in load_file(path / SINGLE_FILE).items()}
        self.tokens = torch.randint(3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(7))
        self.logits = self.compute(self.tokens)
        if world == 1:
            self.model = self.load()

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:  # float64 [num_tokens, vocab_size]
        x = self.weights["model.embed_tokens.weight"][tokens]
        for index, layer in enumerate(self.spec.layers):
            prefix = f"model.layers.{index}."
            x = x + self._attend(self._norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.", layer)
            y = self._norm(x, f"{prefix}post_attention_layernorm")
            gate, up = (y @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (silu(gate) * up) @ self.weights[f"{prefix}mlp.down_proj.weight"].T
        return self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.compute(torch.tensor(tokens))[-1].argmax()))
        return tokens[len(prompt) :]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.spec.norm.eps).sqrt() * self.weights[f"{name}.weight"]

    def _attend(self, x: torch.Tensor, prefix: str, layer: LayerSpec) -> torch.Tensor:
        spec, at = layer.attention, torch.arange(len(x))
        q, k, v = (
            (x @ self.weights[f"{prefix}{name}_proj.weight"].T).split(spec.head_size, -1) for name in ("q", "k", "v")
        )
        assert layer.rope is not None
        angles = at[:, None] * layer.rope.theta ** -(torch.arange(0, spec.head_size, 2).double() / spec.head_size)
        distance = at[:, None] - at
        unseen = (distance < 0) | (distance >= (spec.window or len(x)))
        outs = []
        for head in range(spec.num_heads):
            kv_head = head * spec.num_kv_heads // spec.num_heads
            scores = _turn(q[head], angles) @ _turn(k[kv_head], angles).T * spec.scale
            outs.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[kv_head])
        return torch.cat(outs, -1) @ self.weights[f"{prefix}o_proj.weight"].T


def _turn(head: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate head, [num_tokens, head_size]: elements i and i + head_size / 2 by the angle i."""
    low, high = head.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)
