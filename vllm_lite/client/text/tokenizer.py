"""Text to token ids and back with the `tokenizers` library, by tokenizer.json.

Ids are those of transformers' generic tokenizer class. Since version 5 its classes for Llama and GPT-2 ignore the
file's own steps; where the two differ, this module follows the file.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import tokenizers

from vllm_lite.client.text.templates.template_source import CONFIG_FILE, MAX_FILE_BYTES
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.client.text.tokenizer_formats.conversion import TOKENIZER_FILE
from vllm_lite.errors import ModelError, RequestError, VllmLiteError
from vllm_lite.runtime.untrusted_files import LFS_POINTER, MAX_TOKENIZER_BYTES, is_lfs_pointer, read_bounded

LONG_TEXT_CHARS = 16_384
"""Longer texts are tokenized in a thread, so that other work continues."""
SHORT_TEXT_CHARS = 256
"""Longer texts are not passed to the library's encode(), which keeps the interpreter's lock: a thread that called it a
thousand times with longer texts blocked the loop of a server for 0.8 s."""
SLICE_CHARS = 65_536
CHARS_PER_TOKEN = 8
MAX_ERROR_CHARS = 500
CUT_TOKENS = 256
"""A cut through a text changes only the tokens near it. This is the maximum number of tokens that a slice has more than
its part of the uncut text."""
_BYTE_NAMES = {f"<0x{value:{case}}>": value for value in range(256) for case in ("02X", "02x")}
_MAX_U32 = 2**32 - 1

P = ParamSpec("P")
R = TypeVar("R")


def longest_first(lengths: Sequence[int], room: int) -> tuple[int, int]:
    """Numbers of tokens that two texts keep within `room`: the longer one is truncated until both are equal."""
    short, long = sorted(lengths)
    if short + long > room:
        long = max(short, room - short)
        if short + long > room:
            short = room // 2
            long = room - short
    return (short, long) if lengths[0] <= lengths[1] else (long, short)


def _failures_as(kind: type[VllmLiteError], what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Raise `kind` with `what` if the library fails (a bare Exception) or panics (a BaseException of a type that cannot
    be imported), as it does at any text with a maliciously damaged file."""

    def wrap(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                if type(error) is Exception or type(error).__name__ == "PanicException":
                    raise kind(f"{what}: {str(error)[:MAX_ERROR_CHARS]}") from error
                raise

        return wrapped

    return wrap


_encoding = _failures_as(RequestError, "the model's tokenizer fails on this text")


class _File(msgspec.Struct):
    """The one part of tokenizer.json that the library does not show."""

    decoder: dict[str, Any] | None = None


class _Content(msgspec.Struct):
    """A token, where it is an object."""

    content: str


class _Inputs(msgspec.Struct):
    """The part of tokenizer_config.json about a tokenizer's outputs."""

    model_input_names: list[str] | None = None
    tokenizer_class: str | None = None
    unk_token: str | _Content | None = None

    @property
    def have_types(self) -> bool:
        """Whether the model gets token types, 1 in a pair's second text. Generic classes, as transformers has written
        them since version 5, list it by name; for others the file's post-processor decides."""
        if self.model_input_names is not None:
            return "token_type_ids" in self.model_input_names
        return self.tokenizer_class != "TokenizersBackend"

    @classmethod
    def beside(cls, file: Path) -> "_Inputs":
        try:
            return msgspec.json.decode(read_bounded(file.parent / CONFIG_FILE, MAX_FILE_BYTES), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return cls()


class Placed(NamedTuple):
    """A text's tokens, including special ones added by the file's post-processor, with their offsets."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]
    """Start and end of each token in the text, in characters."""
    is_added: list[int]
    """1 for a token that the post-processor adds."""

    def num_added(self) -> tuple[int, int]:
        """Numbers of added tokens at both ends."""
        first = next((place for place, added in enumerate(self.is_added) if not added), len(self.is_added))
        last = next((place for place, added in enumerate(reversed(self.is_added)) if not added), 0)
        return first, last


class Tokenizer:
    """A loaded tokenizer.json. Nothing changes after loading, so any thread may call any method."""

    def __init__(
        self, data: bytes, source: str = TOKENIZER_FILE, *, has_types: bool = True, unknown: str | None = None
    ) -> None:
        """`data`: content of a tokenizer.json; `source`: its name in errors; without `has_types` all tokens of a pair
        have one type. `unknown`: token for text without tokens; None: the one that the file names, if any. Raises
        ModelError."""
        self.source = source
        self._has_types = has_types
        try:
            self.library = _failures_as(ModelError, f"{source} cannot be read")(tokenizers.Tokenizer.from_buffer)(data)
            self.decoder = msgspec.json.decode(data, type=_File).decoder
        except (ValueError, msgspec.MsgspecError) as error:
            raise ModelError(f"{source} cannot be read: {error}") from error
        # A file may contain truncation and padding for training batches; a prompt gets neither.
        self.library.no_truncation()
        self.library.no_padding()
        self.vocab_size = self.library.get_vocab_size(with_added_tokens=True)
        added = self.library.get_added_tokens_decoder()
        self._spelled: dict[int, str] = {}
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Text -> id of every added token, special or not."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        model = self.library.model
        self.marks_subwords = bool(getattr(model, "continuing_subword_prefix", None))
        """Whether tokens that continue a word are spelled with a prefix."""
        unknown = unknown or getattr(model, "unk_token", None)
        self.unknown_id = None if unknown is None else self.token_id(unknown)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load `path`, a checkpoint's folder, its GGUF file or a tokenizer.json. A tokenizer in another format is
        converted, which takes seconds the first time. Raises ModelError with a remedy."""
        file = conversion.folder_of(path)
        if file.is_dir():
            file /= TOKENIZER_FILE
        try:
            data = read_bounded(file, MAX_TOKENIZER_BYTES)
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read ({error.strerror}); give a folder with a {TOKENIZER_FILE} as tokenizer "
                "(transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
            ) from error
        if is_lfs_pointer(data):
            raise ModelError(f"{file}: {LFS_POINTER}")
        beside = _Inputs.beside(file)
        unknown = beside.unk_token.content if isinstance(beside.unk_token, _Content) else beside.unk_token
        return cls(data, str(file), has_types=beside.have_types, unknown=unknown)

    @_encoding
    def encode(
        self, text: str, *, add_special_tokens: bool = True, num_kept: int | None = None, side: str = "left"
    ) -> list[int]:
        """Tokenize `text`. `add_special_tokens` adds those of the file's post-processor.

        At most `num_kept` tokens are kept, special tokens at both ends included if there is room: the last ones, or
        the first ones if `side`, at which it is cut, is "right".
        """
        encoding = self._encode(text, add_special_tokens)
        if num_kept is not None and len(encoding.ids) > num_kept:
            num_special = self.library.num_special_tokens_to_add(False) if add_special_tokens else 0
            if 0 < num_special < num_kept:
                encoding = self._encode(text, False)
                encoding.truncate(num_kept - num_special, direction=side)
                encoding = self.library.post_process(encoding)
        ids: list[int] = encoding.ids
        if num_kept is None:
            return ids
        return ids[-num_kept:] if side == "left" else ids[:num_kept]

    @_encoding
    def offsets(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Offsets of `token_ids` in `text`, as (start, end) in characters; (0, 0) for a special token that the file's
        post-processor adds. `token_ids` may be truncated, after these special ones or at the end. None if they are not
        the tokens of `text`."""
        for add_special_tokens in (False, True):
            encoding = self._placed(text, add_special_tokens=add_special_tokens)
            ids, places, num_cut = encoding.ids, encoding.offsets, len(encoding) - len(token_ids)
            added = next((place for place, special in enumerate(encoding.special_tokens_mask) if not special), 0)
            for kept in (0, added, len(token_ids)):
                if num_cut >= 0 and [*ids[:kept], *ids[kept + num_cut :]] == token_ids:
                    return [*places[:kept], *places[kept + num_cut :]]
        return None

    @_encoding
    def beginning(self, text: str, num_tokens: int) -> str:
        """Return the longest beginning of `text` with at most `num_tokens` tokens, not counting special ones."""
        num_chars = num_tokens * CHARS_PER_TOKEN + SLICE_CHARS  # tokenize no more of a long text than necessary
        while len(text) > num_chars and len(self._placed(text[:num_chars])) <= num_tokens:
            num_chars *= 2
        text = text[:num_chars]
        while len(encoding := self._placed(text)) > num_tokens:
            encoding.truncate(num_tokens + 1)
            offsets = encoding.offsets
            end = min(offsets[num_tokens - 1][1], offsets[num_tokens][0])
            text = text[: min(end, len(text) - 1)]  # a character of several tokens is dropped as a whole
        return text

    def _placed(self, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
        """Tokenize `text` with the offsets of its tokens. Other threads run meanwhile, unlike in library.encode()."""
        (encoding,) = self.library.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding

    @_encoding
    def encode_batch(
        self, texts: Sequence[str], *, num_kept: int | None = None, side: str = "right"
    ) -> list[list[int]]:
        """Tokenize several texts together, with the special tokens of the file's post-processor.

        At most `num_kept` tokens of each are kept, special ones included: its last ones if `side` is "left", else its
        first ones.
        """
        found = [encoding.ids for encoding in self.library.encode_batch_fast(list(texts))]
        if num_kept is not None:
            for place, ids in enumerate(found):
                if len(ids) > num_kept:
                    found[place] = self._cut(texts[place], num_kept, side)
        return found

    @_encoding
    def placed_batch(self, texts: Sequence[str]) -> list[Placed]:
        """Tokenize several texts together, with the offsets of their tokens."""
        found = self.library.encode_batch(list(texts))
        return [Placed(encoding.ids, encoding.offsets, encoding.special_tokens_mask) for encoding in found]

    def _cut(self, text: str, num_kept: int, side: str) -> list[int]:
        """Truncate the ids of a text; special tokens are kept if there is room for more than them."""
        num_special = self.library.num_special_tokens_to_add(False)
        encoding = self._encode(text, False)
        if num_special < num_kept:
            encoding.truncate(num_kept - num_special, direction=side)
            encoding = self.library.post_process(encoding)
        ids: list[int] = encoding.ids
        return ids[-num_kept:] if side == "left" else ids[:num_kept]

    @_encoding
    def encode_pair(self, first: str, second: str, *, num_kept: int | None = None) -> tuple[list[int], list[int]]:
        """Tokenize two texts as one, with the type of each token. At most `num_kept` tokens are kept; the longer text
        is truncated first."""
        texts = self._encode(first, False), self._encode(second, False)
        if num_kept is not None:
            room = max(0, num_kept - self.library.num_special_tokens_to_add(True))
            for text, count in zip(texts, longest_first(list(map(len, texts)), room), strict=True):
                text.truncate(count)
        encoding = self.library.post_process(*texts)
        return encoding.ids, encoding.type_ids if self._has_types else [0] * len(encoding.ids)

    @_encoding
    def is_longer(self, text: str, num_tokens: int, check: Callable[[], None] = lambda: None) -> bool:
        """Whether `text` surely has more than `num_tokens` tokens, special ones not counted.

        It tokenizes slice by slice and stops as soon as it is certain; `check` is called before each, and may raise.
        """
        count = 0
        for place in range(0, len(text), SLICE_CHARS):
            check()
            (encoding,) = self.library.encode_batch_fast([text[place : place + SLICE_CHARS]], add_special_tokens=False)
            count += max(0, len(encoding) - CUT_TOKENS)
            if count > num_tokens:
                return True
        return False

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) <= SHORT_TEXT_CHARS:
            return self.library.encode(text, add_special_tokens=add_special_tokens)
        (encoding,) = self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    @_failures_as(ModelError, "the model's tokenizer fails to decode")
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `token_ids`. Bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        text: str = self.library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def spelled(self, token_id: int) -> str:
        """Decode a single token. The result is cached, as candidates of logprobs recur."""
        text = self._spelled.get(token_id)
        if text is None:
            text = self._spelled[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None outside the vocabulary."""
        if not 0 <= token_id <= _MAX_U32:
            return None
        token: str | None = self.library.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token by the vocabulary's spelling."""
        token_id: int | None = self.library.token_to_id(token)
        return token_id

    def byte_ids(self) -> dict[int, int]:
        """Map token ids to bytes for the tokens <0x00> .. <0xFF>, which spell text that has no token of its own."""
        ids = {self.token_id(name): value for name, value in _BYTE_NAMES.items()}
        return {token_id: value for token_id, value in ids.items() if token_id is not None}
