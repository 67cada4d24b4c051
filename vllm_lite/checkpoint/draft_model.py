"""Draft models: their compatibility with a model, and their KV in the same block tables. No torch."""

import json
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.eagle_head import check_eagle, read_eagle
from vllm_lite.checkpoint.gemma4_assistant import is_assistant, read_assistant
from vllm_lite.checkpoint.gguf.files import gguf_files, read_files
from vllm_lite.checkpoint.gguf.header import Array
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.mtp_head import head_layers, head_names, head_tensors
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, read_bounded

TOKENIZER_FILE = "tokenizer.json"
SPACE = "▁"
"""SentencePiece's character for a space."""


def read_draft_spec(folder: str) -> ModelSpec:
    """Read the spec of a draft model. Raises ModelError for an unsupported checkpoint, ConfigError for a model that
    cannot draft."""
    spec = load_spec(folder, "native")
    if spec.encoder is not None:
        raise ConfigError(f"the draft model {folder} is an encoder, which makes no next tokens")
    if spec.state_elements:
        raise ConfigError(
            f"the draft model {folder} has recurrent layers, whose states cannot be taken back where a draft is "
            "refused; give one of attention alone"
        )
    return spec


def check_mtp_head(config: EngineConfig, folder: str, spec: ModelSpec) -> None:
    """Raise ConfigError if MTP drafting is configured and the checkpoint in `folder` has no MTP head."""
    speculation = config.speculative_config
    if speculation is None or speculation.method != "mtp":
        return
    head_names(spec)
    if config.load_format != "dummy":
        head_tensors(spec, map(canonical, read_headers(Path(folder))))


def kept_layers(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The layers of a draft model with full attention for their KV: KV is filled in later where nothing was drafted,
    also for tokens outside a window."""
    return tuple(
        msgspec.structs.replace(own, attention=msgspec.structs.replace(own.attention, window=None))
        for own in spec.layers
    )


def with_drafter(config: EngineConfig, spec: ModelSpec, drafter: ModelSpec | None = None) -> ModelSpec:
    """Add the KV groups of the drafter's layers to the model's spec, on each rank. `drafter`: the draft model's spec,
    if already read. Raises as `read_draft_spec`, and ConfigError for a draft model that does not fit the model or the
    number of ranks."""
    speculation = config.speculative_config
    if speculation is not None and speculation.method == "mtp":
        return spec.with_drafter(head_layers(spec), config.tensor_parallel_size)
    if speculation is None or speculation.model is None:
        return spec
    if speculation.method == "eagle3":
        eagle = read_eagle(speculation.model)
        check_eagle(eagle, spec)
        drafter = eagle.spec
    if is_assistant(speculation.model):
        assistant = read_assistant(speculation.model)
        assistant.shared_layers(spec)
        assistant.spec.check_tensor_parallel(Shard.of(config))
        return spec
    drafter = drafter or read_draft_spec(speculation.model)
    if drafter.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"the draft model {speculation.model} has a vocabulary of {drafter.vocab_size} tokens and the model one of "
            f"{spec.vocab_size}; a draft model must have the model's own"
        )
    drafter.check_tensor_parallel(Shard.of(config))
    return spec.with_drafter(kept_layers(drafter), config.tensor_parallel_size)


def check_vocabulary(speculation: Speculation | None, tokenizer: str) -> None:
    """Raise ConfigError if the draft model's tokenizer has another token for an id than that of the folder `tokenizer`.
    Ids that only one has are ignored. Tokenizers in other formats than tokenizer.json and GGUF are not compared."""
    if speculation is None or speculation.method != "draft_model" or speculation.model is None:
        return
    own, other = (_tokens(Path(path)) for path in (tokenizer, speculation.model))
    known = set(own.values())
    differing = [
        (number, token)
        for number, token in other.items()
        if (own[number] != token if number in own else token in known)
    ]
    if differing:
        number, token = min(differing)
        raise ConfigError(
            f"the draft model {speculation.model} has another vocabulary: {len(differing)} tokens differ, the first is "
            f"{number}, {token[:50]!r} and not {own.get(number, '')[:50]!r}; a draft model must have the model's own"
        )


def _tokens(path: Path) -> dict[int, str]:
    """Map ids to tokens, including added ones; empty if the files do not say.

    Converters to GGUF fill vocabularies up with names of their own, which are left out. They write the spaces of some
    tokens as SentencePiece's character and of others as spaces, so here all are spaces."""
    if (path / TOKENIZER_FILE).is_file():
        found = _tokens_of_json(path / TOKENIZER_FILE)
    else:
        found = _tokens_of_gguf(files) if (files := gguf_files(path)) else {}
    return {number: token.replace(SPACE, " ") for number, token in found.items() if token != f"[PAD{number}]"}


def _tokens_of_json(file: Path) -> dict[int, str]:
    try:
        raw: Any = json.loads(read_bounded(file, MAX_TOKENIZER_BYTES))
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, list):  # a unigram model: [token, score] by id
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {entry["id"]: entry["content"] for entry in raw.get("added_tokens", [])}
        return msgspec.convert({number: token for token, number in vocabulary.items()} | added, dict[int, str])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError):
        return {}  # a damaged file is reported by its own reader


def _tokens_of_gguf(files: list[Path]) -> dict[int, str]:
    """Raises ModelError for a damaged file."""
    tokens = read_files(files).metadata.get("tokenizer.ggml.tokens")
    return dict(enumerate(tokens.texts())) if isinstance(tokens, Array) and tokens.is_text else {}
