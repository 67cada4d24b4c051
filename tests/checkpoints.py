"""Tiny random checkpoints in the format of the model hub, made with transformers: config, weights and a tokenizer."""

import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A small engine reads a page, writes a page, and never forgets where the page was.",
    "One, two, three, four, five; once I caught a fish alive. Why did you let it go?",
    "Übung macht den Meister. 猫が好き。 😀 Ça va bien, merci.",
]


def make_checkpoint(path: str | Path, family: str = "llama", *, dtype: str = "float32", **overrides: Any) -> Path:
    """Write a random checkpoint to the folder `path` and return it.

    `family` is "llama", "mistral" or "qwen3"; tests/families has checkpoints of all others.
    `overrides` are arguments of the transformers config, and also `max_shard_size` (like "100KB") for a sharded one and
    `seed`. The weights are wide (initializer_range 0.3), so that every token depends visibly on its whole context.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    classes: dict[str, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    settings: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "qwen3" else 16,
    }
    return write_checkpoint(path, config_class, model_class, settings | overrides, dtype=dtype)


def write_checkpoint(
    path: str | Path, config_class: Any, model_class: Any, settings: dict[str, Any], *, dtype: str = "float32"
) -> Path:
    """Write a random checkpoint of these transformers classes to the folder `path` and return it. `settings` are for
    the config, except for `max_shard_size` and `seed`. With a `text_config`, the other parts of the model are written
    as well."""
    import torch

    path = Path(path)
    shard_size = settings.pop("max_shard_size", "1GB")
    seed = settings.pop("seed", 0)
    usual: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if "text_config" in settings:
        settings["text_config"] = usual | settings["text_config"]
    else:
        settings = usual | settings
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**settings))
        _shake_vectors(model)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard_size)
    _write_tokenizer(path)
    return path


def make_kin(model: Path, folder: Path) -> Path:
    """Write a checkpoint to `folder` whose outputs mostly equal those of `model`: the last of its two layers and its
    head have noise."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        weight = tensors[name].float()
        noise = torch.randn(weight.shape, generator=generator)
        tensors[name] = (weight + 0.25 * weight.std() * noise).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def transformers_model(path: str | Path, architecture: str, dtype: str = "float32") -> Any:
    """Load the checkpoint with transformers, which computes experts one by one here: its grouped products refuse odd
    sizes."""
    import transformers

    return getattr(transformers, architecture).from_pretrained(path, dtype=dtype, experts_implementation="eager")


def _shake_vectors(model: Any) -> None:
    """Randomize norm weights and biases. transformers initializes them to 1 and 0, which would hide a weight that is
    not loaded."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                mean = 0.0 if name.endswith("bias") else 1.0
                parameter.normal_(mean, 0.2)
        for name, bias in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith("layer_scalar"):
                bias.normal_(0.8, 0.1)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias.normal_(0.0, 0.2)
                if bias.dim() == 2:  # one expert gets no token, and another one gets all
                    bias[0, 1:3] = torch.tensor([-10.0, 10.0])


@cache
def _tokenizer_json() -> str:
    return str(trained_tokenizer(_TEXT * 4).to_str())


def trained_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level BPE with a few merges, so that any text can be encoded and some tokens are parts of characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def load_and_see(model: Any, path: str | Path, **options: Any) -> dict[str, Any]:
    """Load the weights of `model`. Returns every tensor that a layer was given, by its checkpoint name."""
    from vllm_lite.models.weights import load_weights

    seen = {}
    groups = model.weight_groups

    def watched(group: Any) -> Any:
        def take(*tensors: Any) -> None:
            for tensor, stack in zip(tensors, group.stacks, strict=True):
                parts = tensor.clone().split([slot.size[stack.dim] for slot in stack.slots], stack.dim)
                seen.update({slot.name: part for slot, part in zip(stack.slots, parts, strict=True)})
            group.take(*tensors)

        return group._replace(take=take)

    model.weight_groups = lambda: map(watched, groups())
    load_weights(model, path, **options)
    del model.weight_groups
    return seen
