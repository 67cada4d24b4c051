"""Converts tokenizers in other formats into a tokenizer.json, each once, in a folder of the user's cache.

The libraries that know these formats are large, and optional (the extras `hf` and `mistral`), so a separate process
loads them and ends with the conversion: client and server never load them. The folder in the cache is named after a
digest of all files that the conversion depends on, and it is complete or does not exist. The next start finds it, and
then needs no library.
"""

import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from vllm_lite.checkpoint.gguf.files import SUFFIX, gguf_files
from vllm_lite.client.text.tokenizer_formats import conversion_process
from vllm_lite.client.text.tokenizer_formats.conversion_process import ConversionSettings, Kind
from vllm_lite.errors import ModelError
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, first_untrusted, read_bounded
from vllm_lite.transport.time_slice import usual_slices

TOKENIZER_FILE = "tokenizer.json"
CONVERT_S = 300.0
"""Seconds that a conversion may take. A vocabulary of 130,000 tokens takes some seconds."""
VERSION = 1
"""Part of every digest. A release that converts differently uses a higher number."""
MODEL_FILES = ("tokenizer.model", "tokenizer.model.v*", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model")
PARTS = (
    *("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tekken.json", "*.tiktoken"),
    *MODEL_FILES,
)
"""All files that a conversion may depend on."""
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")

logger = log.get(__name__)


class Needs(NamedTuple):
    """The modules that converting a kind of file needs, and the extra of this package that installs them."""

    modules: tuple[str, ...]
    extra: str


NEEDS: dict[Kind, Needs] = {
    "sentencepiece": Needs(("transformers", "sentencepiece", "google.protobuf"), "hf"),
    "tiktoken": Needs(("transformers", "tiktoken"), "hf"),
    "vocabulary": Needs(("transformers",), "hf"),
    "tekken": Needs(("transformers", "mistral_common"), "mistral"),
    "gguf": Needs((), ""),
}


class ForeignTokenizer(NamedTuple):
    """A tokenizer in another format: its kind, and its main file."""

    kind: Kind
    file: Path


def find(folder: str | Path) -> ForeignTokenizer | None:
    """The tokenizer in `folder`, or in a GGUF file, that needs a conversion. None if there is a tokenizer.json already,
    or no tokenizer. Raises ModelError if a folder has several GGUF models, or only a part of one."""
    folder = Path(folder)
    if (_beside(folder) / TOKENIZER_FILE).is_file():
        return None
    for file in gguf_files(folder):
        return ForeignTokenizer("gguf", file)
    if not folder.is_dir():
        return None
    if (folder / "tekken.json").is_file():
        return ForeignTokenizer("tekken", folder / "tekken.json")
    for file in _files(folder, MODEL_FILES):
        return ForeignTokenizer("tiktoken" if _is_tiktoken(file) else "sentencepiece", file)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return ForeignTokenizer("vocabulary", folder / "vocab.json")
    for file in _files(folder, ("*.tiktoken",)):
        return ForeignTokenizer("tiktoken", file)
    return None


def has_tokenizer(folder: str | Path) -> bool:
    """Whether `folder` has a tokenizer, in any format."""
    return (_beside(Path(folder)) / TOKENIZER_FILE).is_file() or find(folder) is not None


def made(folder: str | Path) -> Sequence[Path]:
    """The folder with the converted tokenizer of `folder`, as a sequence of one path; empty if there is none yet.
    Raises ModelError for files that cannot be read."""
    place = None if find(folder) is None else _place(Path(folder))
    return [place] if place is not None and _is_made(place) else []


def folder_of(folder: str | Path) -> Path:
    """The folder with the tokenizer.json of `folder`: `folder` itself, or one in the cache, converted now if it is not
    there yet. Raises ModelError in one sentence."""
    found = find(folder)
    if found is None:
        return _beside(Path(folder))
    place = _place(Path(folder))
    if not _is_made(place):
        _check_installed(found)
        with _draft(place) as draft:
            logger.info("converting %s, once, into %s", found.file, place)
            convert(found, draft)
            with suppress(OSError):  # another process was quicker, and made the same
                draft.rename(place)
        _is_made(place)  # checks that the quicker process was not another user's
    return place


def convert(found: ForeignTokenizer, draft: Path) -> None:
    """Write tokenizer.json and its configuration into `draft`, in a separate process. Raises ModelError."""
    ended = threading.Event()
    settings = ConversionSettings(found.kind, str(found.file), str(draft))
    with usual_slices():
        child = supervise.spawn(conversion_process.__name__, settings, "tokenizer conversion", lambda _: ended.set())
    try:
        if not ended.wait(CONVERT_S):
            raise ModelError(f"{found.file} cannot be converted within {CONVERT_S:g} s; {_ADVICE}")
    finally:
        child.stop(0.0)
    error = draft / conversion_process.ERROR_FILE
    reason = child.exited()
    if error.is_file():
        reason = error.read_text(errors="replace")
    elif reason == f"exit status {conversion_process.NO_SPACE}":
        raise _not_kept(draft.parent, os.strerror(errno.ENOSPC))
    elif (draft / TOKENIZER_FILE).is_file() and reason == "exit status 0":
        return
    raise ModelError(f"{found.file} cannot be converted into a {TOKENIZER_FILE}: {reason}; {_ADVICE}")


_ADVICE = f"get the checkpoint with a {TOKENIZER_FILE}, or give the folder of one as tokenizer"


def _check_installed(found: ForeignTokenizer) -> None:
    needs = NEEDS[found.kind]
    missing = [name for name in needs.modules if not is_installed(name)]
    if missing:
        raise ModelError(
            f"{found.file.parent} has no {TOKENIZER_FILE}, and converting its {found.file.name} needs "
            f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'vllm-lite[{needs.extra}]', or {_ADVICE}"
        )


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package of the module is missing
        return False


# ---- files


def _beside(path: Path) -> Path:
    """The folder that contains a GGUF file; any other path unchanged."""
    return path.parent if path.suffix.lower() == SUFFIX and path.is_file() else path


def _files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (file for file in sorted(folder.glob(pattern)) if file.is_file())


def _is_tiktoken(file: Path) -> bool:
    """Whether a file is text in tiktoken's format. The name tokenizer.model is used by tiktoken and by
    SentencePiece."""
    try:
        with file.open("rb") as opened:
            return _TIKTOKEN_LINE.match(opened.read(4096)) is not None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error


def _place(folder: Path) -> Path:
    """The folder in the cache for the tokenizer converted from the files in `folder`. Raises ModelError."""
    digest = hashlib.blake2b(f"{VERSION}".encode(), digest_size=16)
    for file in gguf_files(folder)[:1]:  # too large to read: its path, size and time of change do
        stat = file.stat()
        digest.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return _cache() / digest.hexdigest()
    for file in _files(folder, PARTS):
        try:
            content = read_bounded(file, MAX_TOKENIZER_BYTES)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from error
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return _cache() / digest.hexdigest()


def _is_made(place: Path) -> bool:
    """Whether the cache has a tokenizer.json in `place`. Raises ModelError if another user may have written it: a
    changed tokenizer changes what the model reads and answers."""
    if not (place / TOKENIZER_FILE).is_file():
        return False
    if (path := first_untrusted((place.parent, place, place / TOKENIZER_FILE))) is not None:
        raise ModelError(
            f"{path} belongs to another user, or all users may write it, so the tokenizer in it is not trusted; "
            "set XDG_CACHE_HOME to a folder of your own, or remove it"
        )
    return True


def _cache() -> Path:
    """The folder in the user's cache for all converted tokenizers. Raises ModelError if the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path("~/.cache").expanduser()) / "vllm-lite" / "tokenizers"
    except RuntimeError as error:
        raise ModelError(
            "a converted tokenizer cannot be kept, as the user has no home; set XDG_CACHE_HOME to a folder that can be "
            "written"
        ) from error


def _not_kept(folder: Path, why: str | None) -> ModelError:
    text = (
        f"a converted tokenizer cannot be kept in {folder} ({why}); set XDG_CACHE_HOME to a folder that can be written"
    )
    return ModelError(text)


@contextmanager
def _draft(place: Path) -> Iterator[Path]:
    """A private folder beside `place`, on the same disk. It is removed at the end unless it was renamed."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = Path(mkdtemp(prefix=".", dir=place.parent))
    except OSError as error:
        raise _not_kept(place.parent, error.strerror) from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
