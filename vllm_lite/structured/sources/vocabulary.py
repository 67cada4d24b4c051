"""The vocabulary of grammars: the checkpoint's tokenizer as an LLTokenizer."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLTokenizer

from vllm_lite.errors import ModelError
from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, read_bounded

TOKENIZER_FILE = "tokenizer.json"


class Vocabulary(NamedTuple):
    """A tokenizer and the tokens that can end an output."""

    tokenizer: Any
    """The LLTokenizer; untyped, as llguidance's stubs lack its base class."""
    eos_ids: frozenset[int]
    vocab_size: int
    """Width of the model's logits. Ids without a token are never allowed."""


def load_vocabulary(folder: str | Path, vocab_size: int, eos_ids: Collection[int]) -> Vocabulary:
    """Load a checkpoint's tokenizer. Raises ModelError if there is none, or if grammars cannot use it.

    It takes 2 s for 150,000 tokens, holds the GIL all that time and keeps 130 MB.
    """
    path = Path(folder) / TOKENIZER_FILE
    known = sorted(token for token in eos_ids if 0 <= token < vocab_size)
    if not known:
        raise ModelError(f"the model in {folder} names no token that ends an output, so no grammar could ever end")
    try:
        tokenizer = LLTokenizer(read_bounded(path, MAX_TOKENIZER_BYTES).decode(), n_vocab=vocab_size, eos_token=known)
    except FileNotFoundError as error:
        raise ModelError(f"grammars need the model's tokenizer, and there is no {path}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {path} cannot be used for grammars: {error}") from error
    return Vocabulary(tokenizer, frozenset(known), vocab_size)
