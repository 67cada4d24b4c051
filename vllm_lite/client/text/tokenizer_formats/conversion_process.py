"""Converts one tokenizer and ends. No other part of the client loads transformers or mistral-common.

A wrong conversion gives other tokens without any error, and a model that reads them writes nonsense. For example, if no
config says how a SentencePiece file is read, transformers 5.23 omits the space before the first word of a text. So
every conversion is checked here. On plain texts it must give the ids that the format's own library gives
(SentencePiece, mistral-common), and decoding the ids must give each text back.
"""

import errno
import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.untrusted_files import read_bounded
from vllm_lite.runtime.wakeup import Wakeup

Kind = Literal["sentencepiece", "tiktoken", "vocabulary", "tekken", "gguf"]
ERROR_FILE = "error.txt"
NO_SPACE = 3
"""Exit status when the disk is full: no sentence can be written then."""
MAX_MEMORY_BYTES = 4 * 1024**3
"""Largest address space of the process, in bytes. A vocabulary of 130,000 tokens takes 0.6 GB."""
MAX_ERROR_CHARS = 500
TEXTS = ("the cat sat on the mat", "Hello, World! How are you?", "a = b + 12345; return x", "one\ntwo")
"""Texts that every tokenizer gives back. None begins with a space or has two spaces in a row, where libraries
differ."""
MORE_TEXTS = ("naïve café", "日本語 🙂", "Привет, мир")
"""Texts of which only the ids are compared: a vocabulary without byte tokens cannot give these texts back."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # all files are here: nothing may be downloaded
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # threads take address space, which is limited
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ConversionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`file` is the main file of a tokenizer; its other files are in the same folder. The result is written into
    `out`."""

    kind: Kind
    file: str
    out: str
    max_memory_bytes: int = MAX_MEMORY_BYTES


_UNMAPPED = "failed to map segment"
"""Text of the dynamic linker in the ImportError of a library that does not fit into memory."""


class _UnprovedError(Exception):
    """A converted tokenizer differs from its original, or cannot be shown to equal it."""


def main(settings: ConversionSettings, stop: Wakeup) -> int:
    """Write tokenizer.json and its configuration, or on failure one sentence into ERROR_FILE."""
    del stop  # a signal ends this process at once
    os.environ.update(_ENVIRONMENT)
    logging.disable()
    warnings.simplefilter("ignore")
    sys.modules["torch"] = None  # type: ignore[assignment] # it would be imported, for seconds, and nothing here needs it
    return write(limit_memory(settings))


def limit_memory(settings: ConversionSettings) -> ConversionSettings:
    """Limit the address space of this process. Returns `settings` with the limit that applies."""
    mapped = Path(settings.file).stat().st_size if settings.kind == "gguf" else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = settings.max_memory_bytes + mapped
    if hard != resource.RLIM_INFINITY:  # as `ulimit -v` set it: it cannot be raised
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return msgspec.structs.replace(settings, max_memory_bytes=most - mapped)


def write(settings: ConversionSettings) -> int:
    """Convert and check the tokenizer. `main` calls this after it has limited the process."""
    try:
        _converted(settings).save_pretrained(settings.out)
        return 0
    except Exception as error:  # any exception of a library is about the file
        if _lacks_space(error):
            return NO_SPACE
        Path(settings.out, ERROR_FILE).write_text(_sentence(error, settings))
        return 1


def _sentence(error: Exception, settings: ConversionSettings) -> str:
    if isinstance(error, _UnprovedError):
        return str(error)
    if _lacks_memory(error):
        return f"it takes more than {settings.max_memory_bytes >> 20} MiB of memory"
    text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is that the process has no memory left."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _UNMAPPED in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _lacks_space(error: Exception) -> bool:
    """Whether the disk, or the user's quota, is full. Libraries in Rust name the number of the error in their text."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in numbers or any(f"(os error {number})" in str(error) for number in numbers)


def _converted(settings: ConversionSettings) -> Any:
    """The tokenizer from the first way of reading the file that passes the checks. If none does, raises the error of
    the last way."""
    file = Path(settings.file)
    oracle = _ORACLES.get(settings.kind)
    ids_of = None if oracle is None else oracle(file)
    failed: Exception = _UnprovedError("no library reads it")
    for read in _WAYS[settings.kind]:
        try:
            tokenizer = read(file)
            _check(tokenizer, ids_of)
            return tokenizer
        except Exception as error:
            failed = error
    raise failed


def _check(tokenizer: Any, ids_of: Callable[[str], list[int]] | None) -> None:
    """Raises _UnprovedError if the tokenizer does not give texts back, or if its ids differ from those of `ids_of`."""
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != text and not (getattr(tokenizer, "folds_texts", False) and _folded(back) == _folded(text)):
            raise _UnprovedError(f"the tokenizer that transformers makes turns {text!r} into {back!r}")
    if ids_of is None:
        return
    for text in (*TEXTS, *MORE_TEXTS):
        ids, wanted = tokenizer.encode(text, add_special_tokens=False), ids_of(text)
        if ids != wanted:
            raise _UnprovedError(f"the tokenizer that transformers makes has tokens {ids} for {text!r}, not {wanted}")


def _folded(text: str) -> str:
    """The text without its spaces and capitals, which WordPiece and unigram models do not keep."""
    return "".join(text.casefold().split())


# ---- the libraries


def _declared(file: Path) -> Any:
    """The tokenizer as config.json and tokenizer_config.json declare it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)
    except ValueError as error:
        if "instantiate the backend tokenizer" not in str(error):
            raise
        raise _UnprovedError("no tokenizer_class in tokenizer_config.json says what kind of tokenizer it is") from error


def _tiktoken(file: Path) -> Any:
    """The tokenizer of a tiktoken file. The file has neither special tokens nor the pattern that splits texts into
    words: tokenizer_config.json must have them."""
    if file.suffix == ".tiktoken":
        raise _UnprovedError(
            "its special tokens and its pattern are in Python code of the checkpoint, which is not run"
        )
    tokenizer = _declared(file)
    if not tokenizer.added_tokens_decoder:
        raise _UnprovedError("neither it nor tokenizer_config.json has any special tokens")
    return tokenizer


def _llama(file: Path) -> Any:
    """SentencePiece's BPE with a space before the text, for files without a configuration that says how to read
    them."""
    from transformers import LlamaTokenizer

    config = file.parent / "tokenizer_config.json"
    says_bos = config.is_file() and "add_bos_token" in msgspec.json.decode(read_bounded(config))
    more: dict[str, Any] = {} if says_bos else {"add_bos_token": True}  # as Llama was trained
    return LlamaTokenizer.from_pretrained(file.parent, **more)


def _tekken(file: Path) -> Any:
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    tokenizer: Any = convert_tekken_tokenizer(str(file))
    tokenizer.add_bos_token = True  # mistral-common puts it before every text
    return tokenizer


def _sentencepiece_ids(file: Path) -> Callable[[str], list[int]]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return lambda text: list(processor.encode(text))


def _tekken_ids(file: Path) -> Callable[[str], list[int]]:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(file)
    return lambda text: list(tokenizer.encode(text, bos=False, eos=False))


class _Gguf:
    """A GGUF file's tokenizer with the methods that the checks call. The library that will serve it reads it."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        from vllm_lite.client.text.tokenizer_formats.gguf_tokenizer import GgufTokenizer

        self._made = GgufTokenizer(file)
        self._library = Tokenizer.from_str(msgspec.json.encode(self._made.make()).decode())
        self.folds_texts = self._made.folds_texts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], **_: bool) -> str:
        text: str = self._library.decode(ids)
        return text

    def save_pretrained(self, folder: str) -> None:
        self._made.write(Path(folder))


_WAYS: dict[Kind, tuple[Callable[[Path], Any], ...]] = {
    "sentencepiece": (_declared, _llama),
    "tiktoken": (_tiktoken,),
    "vocabulary": (_declared,),
    "tekken": (_tekken,),
    "gguf": (_Gguf,),
}
_ORACLES: dict[Kind, Callable[[Path], Callable[[str], list[int]]]] = {
    "sentencepiece": _sentencepiece_ids,
    "tekken": _tekken_ids,
}


if __name__ == "__main__":
    run_child(main, ConversionSettings)
