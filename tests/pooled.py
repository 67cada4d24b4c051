"""Tiny random checkpoints of models for vectors and scores, and transformers' results for them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoints import write_checkpoint

SMALL: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 160, "intermediate_size": 96}
MODERN = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 16, "num_hidden_layers": 4}
QWEN3 = {"num_key_value_heads": 2, "head_dim": 16}
OSS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
"""Sizes of OpenAI's privacy filter."""


def write_pooled(path: Path, name: str, settings: dict[str, Any] | None = None, *, dtype: str = "float32") -> Path:
    """Write a checkpoint of the class `name` of transformers, like "BertModel"."""
    import transformers

    model_class = getattr(transformers, name)
    defaults = SMALL | (MODERN if name.startswith("Modern") else {}) | (QWEN3 if name.startswith("Qwen3") else {})
    settings = {"initializer_range": 0.15} | defaults | (settings or {})
    return write_checkpoint(path, model_class.config_class, model_class, settings, dtype=dtype)


def add_modules(path: Path, mode: str, *, normalize: bool = True, dense: int = 0, longest: int | None = None) -> Path:
    """Write the files that sentence-transformers adds to a checkpoint: pooling, a dense layer, normalization."""
    import torch
    from safetensors.torch import save_file

    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    parts += [("2_Dense", "Dense")] if dense else []
    parts += [("3_Normalize", "Normalize")] if normalize else []
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(parts)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    config = json.loads((path / "config.json").read_text())
    size = config.get("hidden_size") or config["dim"]
    flags = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    pooling = {
        "word_embedding_dimension": size,
        **{f"pooling_mode_{flag}": kind == mode for kind, flag in flags.items()},
    }
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if longest is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    if dense:
        (path / "2_Dense").mkdir()
        config = {"in_features": size, "out_features": dense, "bias": True}
        (path / "2_Dense" / "config.json").write_text(
            json.dumps({**config, "activation_function": "torch.nn.modules.activation.Tanh"})
        )
        generator = torch.Generator().manual_seed(5)
        weights = {"linear.weight": torch.randn(dense, size, generator=generator) / 8, "linear.bias": torch.ones(dense)}
        save_file(weights, path / "2_Dense" / "model.safetensors")
    return path


def vectors(path: Path, prompts: Sequence[Sequence[int]], mode: str, finish: Callable[[Any], Any] | None = None) -> Any:
    """The vectors of token ids by transformers and five lines of pooling: float32 [len(prompts), size]."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for ids in prompts:
            states = model(torch.tensor([ids])).last_hidden_state[0]
            found.append({"cls": states[0], "last": states[-1], "mean": states.mean(0)}[mode])
    stacked = torch.stack(found)
    return torch.nn.functional.normalize(stacked, dim=1) if finish is None else finish(stacked)


def logits(path: Path, prompts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Any:
    """The logits that transformers' classifier gives for token ids: float32 [len(prompts), labels]."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for place, ids in enumerate(prompts):
            more = {} if types is None else {"token_type_ids": torch.tensor([types[place]])}
            found.append(model(torch.tensor([ids]), **more).logits[0])
    return torch.stack(found)


def token_logits(path: Path, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """The logits that transformers' classifier of tokens gives for token ids: float32 [tokens, labels] of each."""
    import torch
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]
