"""Token ids to text, one token at a time. The result is exactly the text that decoding them all at once gives.

There are two kinds of tokenizer and one small automaton for each. A byte-level token is a string of bytes, so a stream
of them is a stream of UTF-8. Every other token is a piece of text that depends on its position in two ways only: the
first one may lose its leading space, and a run of byte tokens (<0xE2> <0x82> <0xAC>) is text as a whole or, if it is
not UTF-8, one U+FFFD for each byte. Other decoders are rejected when the vocabulary is made.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from vllm_lite.client.text.stop_strings import StopStrings
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError

MAX_HELD_BYTES = 64
"""Maximum byte tokens of one run that wait for its end. A longer run streams character by character, as some scripts
consist only of byte tokens. If it proves not to be UTF-8 after that point, the text that was sent stays."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Mark(NamedTuple):
    """The position of an added token in a text, which distinguishes it from text that spells such a token.

    It is token `num_before` of its output, at [start, end) of the text; empty for a token that is not shown.
    """

    num_before: int
    start: int
    end: int
    token_id: int


class TextStream(Protocol):
    """The text of one sequence of tokens."""

    def feed(self, token_id: int) -> str:
        """Take a token. Returns the text that has become certain; "" while a character is incomplete."""

    def flush(self) -> str:
        """Return the rest at the end, with U+FFFD for an incomplete character."""


class TokenTexts(Protocol):
    """The state that all streams of one tokenizer share. It is filled on demand. Any thread may use it, as entries
    never change."""

    @property
    def added(self) -> Mapping[int, str]:
        """The texts of added tokens."""

    def stream(self, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> TextStream: ...


def vocabulary(tokenizer: Tokenizer) -> TokenTexts:
    """Make the vocabulary for the tokenizer's decoder. Raises ModelError if neither automaton fits it."""
    steps = _decoder_steps(tokenizer.decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteVocabulary(tokenizer)
    for place, step in enumerate(steps):
        fused = any(before["type"] == "Fuse" for before in steps[:place])
        if not _is_local(step, fused):
            raise ModelError(f"{tokenizer.source}: its decoder {step['type']!r} is not supported in this combination")
    return PieceVocabulary(tokenizer)


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_local(step: dict[str, Any], fused: bool) -> bool:
    """Whether this step of a decoder treats tokens independently, except the first one and runs of bytes."""
    match step["type"]:
        case "Fuse" | "Metaspace":
            return True
        case "ByteFallback" | "WordPiece":
            return not fused
        case "Replace":  # after Fuse the pattern could span tokens, unless it is one character
            return not fused or len(step["pattern"].get("String", "??")) == 1
        case "Strip":  # strips every token or, after Fuse, the beginning of the text
            return not fused or step["stop"] == 0
    return False


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: text for text, token_id in tokenizer.added_tokens.items()}


# ---- byte-level


class ByteVocabulary:
    """Token id -> bytes, for tokenizers whose tokens spell bytes in the GPT-2 alphabet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids = tokenizer.special_ids
        self.added = _by_id(tokenizer)
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def stream(self, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> TextStream:  # noqa: ARG002
        """There are no spaces between special tokens."""
        return ByteStream(self, self.special_ids if skip_special_tokens else frozenset())

    def bytes_of(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = _spelled_bytes(self._tokenizer.token(token_id) or "")
        return data


def _spelled_bytes(token: str) -> bytes:
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:  # an added token that is not spelled in the alphabet is plain text
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 maps to itself, the other 68 bytes to U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letters = {chr(value): value for value in printable}
    return letters | {chr(0x100 + place): value for place, value in enumerate(others)}


BYTE_OF_LETTER = _byte_alphabet()


class ByteStream:
    def __init__(self, vocabulary: ByteVocabulary, skipped: frozenset[int]) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


# ---- pieces of text, with byte fallback


class PieceVocabulary:
    """Token id -> text, for tokenizers whose decoder depends only on the text's beginning and on runs of bytes.

    The text of a token inside a text is found by decoding it after an anchor, an ordinary token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids = tokenizer.special_ids
        self.added = _by_id(tokenizer)
        kinds = {step["type"] for step in _decoder_steps(tokenizer.decoder)}
        self.byte_ids = tokenizer.byte_ids() if "ByteFallback" in kinds else {}
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor, self._anchor_chars = self._find_anchor()

    def stream(self, skip_special_tokens: bool, spaces_between_special_tokens: bool = True) -> TextStream:
        if skip_special_tokens:
            return PieceStream(self, self.special_ids)
        return PieceStream(self, frozenset(), frozenset() if spaces_between_special_tokens else self.special_ids)

    def spelling(self, token_id: int) -> str:
        """The vocabulary's spelling of the token."""
        return self._tokenizer.token(token_id) or ""

    def knows(self, token_id: int) -> bool:
        return token_id in self._known or self._tokenizer.token(token_id) is not None

    def first_text(self, token_ids: list[int]) -> str:
        """Decode tokens with nothing before them."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def later_text(self, token_ids: list[int]) -> str:
        """Decode tokens with something before them."""
        if len(token_ids) > 1:
            return self._behind_anchor(token_ids)
        text = self._known.get(token_ids[0])
        if text is None:
            text = self._known[token_ids[0]] = self._behind_anchor(token_ids)
        return text

    def _behind_anchor(self, token_ids: list[int]) -> str:
        return self.first_text([self._anchor, *token_ids])[self._anchor_chars :]

    def _find_anchor(self) -> tuple[int, int]:
        for token_id in range(self._tokenizer.vocab_size):
            if token_id not in self.byte_ids and token_id not in self.special_ids and self.knows(token_id):
                text = self.first_text([token_id])
                if text:
                    return token_id, len(text)
        raise ModelError(f"{self._tokenizer.source}: no token of its vocabulary has any text")


class PieceStream:
    def __init__(
        self, vocabulary: PieceVocabulary, skipped: frozenset[int], joined: frozenset[int] = frozenset()
    ) -> None:
        """A token of `joined` gets no space before it if the token before it is one too."""
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._joined = joined
        self._last_joined = False
        self._first: list[int] | None = []  # tokens so far, until one of them has text; then None
        self._run: list[int] = []  # byte tokens that wait for the end of their run
        self._run_bytes = 0  # length of the run, waiting or not
        self._complete = 0  # number of waiting tokens that are whole characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._broken = False  # the run is not UTF-8, so each of its bytes is U+FFFD

    def feed(self, token_id: int) -> str:
        value = self._vocabulary.byte_ids.get(token_id)
        if value is not None:
            return self._feed_byte(token_id, value)
        if token_id in self._skipped or not self._vocabulary.knows(token_id):
            return ""  # skipped, so a run of bytes continues after it
        behind, self._last_joined = self._last_joined, token_id in self._joined
        if behind and self._last_joined:
            return self._vocabulary.spelling(token_id)
        return self._end_run() + self._text([token_id])

    def flush(self) -> str:
        return self._end_run()

    def _feed_byte(self, token_id: int, value: int) -> str:
        self._last_joined = False
        if self._broken:
            return _REPLACEMENT
        self._run.append(token_id)
        self._run_bytes += 1
        try:
            self._utf8.decode(bytes((value,)))
        except UnicodeDecodeError:
            self._broken = True
            return self._release(len(self._run))
        if not self._utf8.getstate()[0]:
            self._complete = len(self._run)
        return self._release(self._complete) if self._run_bytes > MAX_HELD_BYTES else ""

    def _end_run(self) -> str:
        text = self._release(len(self._run))
        if self._run_bytes:
            self._run_bytes = 0
            self._broken = False
            self._utf8.reset()
        return text

    def _release(self, count: int) -> str:
        if not count:
            return ""
        token_ids, self._run = self._run[:count], self._run[count:]
        self._complete = 0
        return self._text(token_ids)

    def _text(self, token_ids: list[int]) -> str:
        if self._first is None:
            return self._vocabulary.later_text(token_ids)
        self._first += token_ids
        text = self._vocabulary.first_text(self._first)
        if text:
            self._first = None
        return text


# ---- both, with stop strings


class Detokenizer:
    """The text of one stream, up to its stop string. `stopped`: the stop string that was found; `num_tokens`: tokens up
    to it; `marks`: positions of added tokens, including those after text that is held back.

    A stop string counts once there are more than `min_tokens` tokens, that is, from the first token that may end the
    text. It is searched in the text, so it may be within one token or span many.
    """

    def __init__(
        self,
        vocabulary: TokenTexts,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self.stopped: str | None = None
        self.marks: list[Mark] = []
        self._num_chars = 0
        self._added = vocabulary.added
        self._stream = vocabulary.stream(skip_special_tokens, spaces_between_special_tokens)
        self._stops = StopStrings(stop, include_stop) if stop else None
        self._min_tokens = min_tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take tokens and return the new text. Tokens after a stop string are ignored."""
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            text = self._stream.feed(token_id)
            self._num_chars += len(text)
            if token_id in self._added:
                self._mark(token_id, text)
            self.num_tokens += 1
            pieces.append(self._pass(text))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stopped is not None:
            return ""
        text = self._pass(self._stream.flush())
        if self._stops is not None and self.stopped is None:
            text += self._stops.flush()
        return text

    def _mark(self, token_id: int, text: str) -> None:
        """Record the position of an added token. `text` became certain by it: that of waiting bytes, then its own if
        it is shown."""
        spelled, end = self._added[token_id], self._num_chars
        start = end - len(spelled) if text.endswith(spelled) else end
        self.marks.append(Mark(self.num_tokens, start, end, token_id))

    def _pass(self, text: str) -> str:
        if self._stops is None:
            return text
        text = self._stops.feed(text, armed=self.num_tokens > self._min_tokens)
        self.stopped = self._stops.found
        return text
