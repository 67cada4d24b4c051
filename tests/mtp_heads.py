"""MTP heads for tiny checkpoints, and the head in plain torch, from its published description."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import transformers_model
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.mtp_head import head_names


def copied_layers(layers: Any, count: int) -> list[int]:
    """The layers of a model that its head copies: the last one with attention, and the last one with an MLP if that has
    none."""
    kinds = [getattr(layer, "block_type", "full_attention" if hasattr(layer, "self_attn") else "") for layer in layers]
    attending = max(place for place, kind in enumerate(kinds) if kind == "full_attention")
    plain = [place for place, kind in enumerate(kinds) if kind in ("moe", "mlp")]
    return [attending, *plain[-1:]][:count]


def add_head(path: Path, seed: int = 0) -> Path:
    """Add a head to the checkpoint in `path`: a random layer like its last one with attention, and copies of shared
    tensors if the family stores them."""
    spec = load_spec(path)
    names, tensors = head_names(spec), load_file(path / "model.safetensors")
    size, generator = spec.hidden_size, torch.Generator().manual_seed(seed)
    whole, stem = transformers_model(path, spec.architecture).model.layers, stem_of(tensors)
    for index, own in zip(copied_layers(whole, len(names.layers)), names.layers, strict=True):
        prefix = f"{stem}.layers.{index}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            noise = torch.randn(tensors[name].shape, generator=generator)
            tensors[own + name.removeprefix(prefix)] = tensors[name] + 0.1 * noise.to(tensors[name].dtype)
    for name in (names.embedding_norm, names.hidden_norm, names.norm):
        tensors[f"{name}.weight"] = 0.5 + 0.2 * torch.randn(size, generator=generator)
    tensors[f"{names.fc}.weight"] = torch.randn(size, 2 * size, generator=generator) * size**-0.5
    if names.layers[0].startswith("model."):
        tensors[f"{names.layers[0]}embed_tokens.weight"] = torch.zeros(spec.vocab_size, size)
        tensors[f"{names.layers[0]}shared_head.head.weight"] = torch.zeros(spec.vocab_size, size)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def stem_of(tensors: dict[str, torch.Tensor]) -> str:
    """Return the beginning of the names of a checkpoint's layers."""
    return "backbone" if any(name.startswith("backbone.") for name in tensors) else "model"


class HeadTwin:
    """The head of the checkpoint in `path` in plain torch, with transformers' layers."""

    def __init__(self, path: Path) -> None:
        self.spec = load_spec(path)
        self.model = transformers_model(path, self.spec.architecture).eval()
        names, tensors = head_names(self.spec), load_file(path / "model.safetensors")
        places, stem = copied_layers(self.model.model.layers, len(names.layers)), stem_of(tensors)
        with TemporaryDirectory() as folder:  # transformers has other names for some of its tensors
            shutil.copytree(path, folder, dirs_exist_ok=True)
            moved = {name: value for name, value in tensors.items() if not name.startswith(names.layers)}
            for index, own in zip(places, names.layers, strict=True):
                place = f"{stem}.layers.{index}."
                head = {name.removeprefix(own): name for name in tensors if name.startswith(own)}
                moved |= {f"{place}{part}": tensors[name] for part, name in head.items() if f"{place}{part}" in moved}
            save_file(moved, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            layers = transformers_model(folder, self.spec.architecture).eval().model.layers
            self.layers = [layers[index] for index in places]
        self.norms = [tensors[f"{name}.weight"] for name in (names.embedding_norm, names.hidden_norm, names.norm)]
        self.fc = tensors[f"{names.fc}.weight"]

    def norm(self, x: torch.Tensor, which: int) -> torch.Tensor:
        weight = self.norms[which] + (1 if self.spec.norm.plus_one else 0)
        return x * (x.pow(2).mean(-1, keepdim=True) + self.spec.norm.eps).rsqrt() * weight

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, unknown: tuple[int, ...] = ()) -> list[int]:
        """The most likely `count` tokens after `tokens`. `unknown`: indexes of tokens whose preceding hidden state was
        unknown."""
        ids = torch.tensor([tokens])
        states = self.model.model(ids, use_cache=False).last_hidden_state[0]  # after the last norm
        before = torch.cat((torch.zeros(1, states.shape[1]), states[:-1]))
        before[list(unknown)] = 0
        for _ in range(count):
            ids = torch.tensor([tokens])
            embedded = self.model.model.get_input_embeddings()(ids)[0]
            x = torch.cat((self.norm(embedded, 0), self.norm(before, 1)), 1) @ self.fc.T
            n = len(tokens)
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            positions = torch.arange(n)[None]
            given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
            if hasattr(self.model.model, "rotary_emb"):
                given["position_embeddings"] = self.model.model.rotary_emb(x[None], positions)
            y = x[None]
            for layer in self.layers:
                y = layer(y, **given)
                y = y[0] if isinstance(y, tuple) else y
            y = self.norm(y[0], 2)
            tokens = [*tokens, int((self.model.lm_head(y[-1])).argmax())]
            before = torch.cat((before, y[-1:]))
        return tokens[len(tokens) - count :]
