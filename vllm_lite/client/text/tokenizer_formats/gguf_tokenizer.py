"""Converts the tokenizer of a GGUF file into tokenizer.json and tokenizer_config.json.

The kinds are BPE, SentencePiece's BPE and unigram model, and WordPiece. The keys read are `tokenizer.ggml.model`,
`pre`, `tokens`, `scores`, `merges`, `token_type` and some ids and flags, as https://github.com/ggml-org/ggml documents
them.
"""

import base64
import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.checkpoint.gguf.header import Array, Value, read_metadata
from vllm_lite.client.text.tokenizer_formats.pre_tokenizers import BYTES, UNNAMED, WORDS, Words
from vllm_lite.errors import ModelError

logger = logging.getLogger(__name__)

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
MAX_TOKENS = 1 << 21
MAX_TOKEN_CHARS = 4096
MAX_MAP_BYTES = 1 << 24
SPACE = "▁"
"""SentencePiece's character for a space."""
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class Type(IntEnum):
    """Kinds of tokens in `token_type`, those used here."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


ADDED = (Type.UNKNOWN, Type.CONTROL, Type.USER_DEFINED)
"""Types of tokens that are searched for in a text before it is cut into words."""
SPACES_TO_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


class GgufTokenizer:
    """The tokenizer of a GGUF file, checked."""

    def __init__(self, file: Path) -> None:
        """Raises ModelError for a file whose tokenizer is damaged, or of a kind that is not supported."""
        self.file, self.values = file, read_metadata(file)
        self.model = self.values.get(f"{KEY}model")
        makers = {
            "gpt2": self._merged,
            "whitespace": self._merged,
            "gemma4": self._merged,
            "llama": self._pieces,
            "t5": self._likeliest_pieces,
            "bert": self._word_pieces,
        }
        if self.model not in makers:
            raise self.error(f"its tokenizer {self.model!r} is not supported; supported: {', '.join(makers)}")
        self.tokens = self._texts("tokens")
        if not self.tokens or len(self.tokens) > MAX_TOKENS:
            raise self.error(f"{KEY}tokens has {len(self.tokens)} tokens; it must have 1 to {MAX_TOKENS}")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.types = self._numbers("token_type") or [1] * len(self.tokens)
        self.make = makers[str(self.model)]

    @property
    def folds_texts(self) -> bool:
        """Whether decoding may change a text's spaces and capitals."""
        return self.model in ("bert", "t5", "whitespace")

    def write(self, folder: Path) -> None:
        """Write both files into `folder`."""
        (folder / "tokenizer.json").write_bytes(msgspec.json.encode(self.make()))
        (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(self.config()))

    def config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json: special tokens and chat templates."""
        found: dict[str, Any] = {
            name: self.tokens[token_id]
            for name, key in SPECIAL_TOKENS.items()
            if (token_id := self._token_id(key)) is not None
        }
        templates = dict(self._templates())
        if list(templates) == ["default"]:
            return found | {"chat_template": templates["default"]}
        return found | {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}

    def _templates(self) -> Iterator[tuple[str, str]]:
        for key, text in self.values.items():
            if isinstance(text, str) and (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")):
                yield key.removeprefix(TEMPLATE).removeprefix(".") or "default", text

    # ---- the kinds

    def _merged(self) -> dict[str, Any]:
        """BPE of bytes or of characters, with the merges of the file."""
        words = self._words()
        if words.are_bytes:
            normalizer: Any = {"type": "NFC"} if words.nfc else None
            decoder: Any = BYTES
        elif words.spaces_are_pieces:
            normalizer, decoder = SPACES_TO_PIECES, _pieces_to_text()
        else:
            normalizer = {"type": "Lowercase"} if self._flag("normalizer.lowercase", default=False) else None
            decoder = None
        steps = list(words.steps)
        return {
            "added_tokens": list(self._added(normalized=False)),
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}
            if len(steps) > 1
            else next(iter(steps), None),
            "post_processor": self._ends(bos=words.adds_bos, otherwise=BYTES if words.are_bytes else None),
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "vocab": self.ids,
                "merges": self._merges(),
                "ignore_merges": words.whole_words,
                **({} if words.are_bytes else self._unknowns()),
            },
        }

    def _words(self) -> Words:
        """The rules that cut texts into words: those that the file names, or else those of its architecture."""
        architecture = self.values.get("general.architecture")
        name = self.model if self.model in WORDS else self.values.get(f"{KEY}pre", UNNAMED.get(str(architecture)))
        if name is None:
            logger.warning(
                "%s has no %spre: its texts are cut into words as GPT-2's mostly are, which may not be what the model "
                "was trained with; put its tokenizer.json beside the file",
                self.file,
                KEY,
            )
            name = "default"
        if name not in WORDS:
            known = f"supported: {', '.join(WORDS)}, or any tokenizer.json beside the file"
            raise self.error(f"how its tokenizer cuts words ({KEY}pre {name!r}) is not known; {known}")
        return WORDS[str(name)]

    def _unknowns(self) -> dict[str, Any]:
        """The fields of the model that say how characters without a token are encoded."""
        unknown = self._token_id("unknown_token_id")
        return {
            "unk_token": None if unknown is None else self.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": "<0x00>" in self.ids,
        }

    def _pieces(self) -> dict[str, Any]:
        """SentencePiece's BPE, which merges by scores."""
        prefix = self._flag("add_space_prefix", default=True)
        before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        return {
            "added_tokens": list(self._added(normalized=False)),
            "normalizer": {"type": "Sequence", "normalizers": [*before, SPACES_TO_PIECES]},
            "pre_tokenizer": None,
            "post_processor": self._ends(bos=True, otherwise=None),
            "decoder": _pieces_to_text(strips=prefix),
            "model": {"type": "BPE", "vocab": self.ids, "merges": self._merges_by_score(), **self._unknowns()},
        }

    def _likeliest_pieces(self) -> dict[str, Any]:
        """SentencePiece's unigram model: it chooses the way to cut a text whose tokens have the largest sum of
        scores."""
        unknown = self._token_id("unknown_token_id")
        if unknown is None:
            raise self.error(f"{KEY}unknown_token_id is missing, or no token; a tokenizer of model 't5' needs one")
        prefix = "always" if self._flag("add_space_prefix", default=True) else "never"
        metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prefix, "split": True}
        steps = [{"type": "WhitespaceSplit"}] if self._flag("remove_extra_whitespaces", default=True) else []
        return {
            "added_tokens": list(self._added(normalized=False)),
            "normalizer": self._character_map(),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, metaspace]},
            "post_processor": self._ends(bos=False, eos=True, otherwise=None),
            "decoder": metaspace,
            "model": {
                "type": "Unigram",
                "vocab": list(zip(self.tokens, self._scores(), strict=True)),
                "unk_id": unknown,
                "byte_fallback": "<0x00>" in self.ids,
            },
        }

    def _character_map(self) -> dict[str, Any] | None:
        """SentencePiece's table that replaces characters by others, taken from the file unchanged."""
        found = self._array("precompiled_charsmap")
        if found is None:
            return None
        table = bytes(number & 0xFF for number in self._bytes_of_map(found))
        trie_size = int.from_bytes(table[:4], "little")
        if len(table) < 4 or trie_size % 4 or trie_size + 4 >= len(table):
            raise self.error(f"{KEY}precompiled_charsmap has {len(table)} bytes, and its trie ends beyond them")
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}

    def _word_pieces(self) -> dict[str, Any]:
        """BERT's WordPiece. In the file, a piece that begins a word starts with SentencePiece's space, and a piece
        within a word has no mark. In tokenizer.json the first has no mark, and the second starts with "##"."""
        unknown, lower = self._token_id("unknown_token_id"), self._flag("normalizer.lowercase", default=True)
        spellings = [self._spelling(number) for number in range(len(self.tokens))]
        first = self._token_id("cls_token_id", "bos_token_id", "[CLS]")
        last = self._token_id("seperator_token_id", "eos_token_id", "[SEP]")
        return {
            "added_tokens": list(self._added(normalized=False)),
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": self._flag("normalizer.strip_accents", default=lower),
                "lowercase": lower,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": _around(self.tokens, first, last),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "vocab": {spelling: number for number, spelling in enumerate(spellings)},
                "unk_token": "[UNK]" if unknown is None else self.tokens[unknown],
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        }

    def _spelling(self, number: int) -> str:
        """A token of WordPiece as tokenizer.json spells it. Tokens in brackets or of types in ADDED stay as they
        are."""
        token = self.tokens[number]
        if self.types[number] in ADDED or (token.startswith("[") and token.endswith("]")):
            return token
        return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"

    def _added(self, *, normalized: bool) -> Iterator[dict[str, Any]]:
        """The entries of `added_tokens`: all tokens of the types in ADDED."""
        for number, kind in enumerate(self.types):
            if kind in ADDED:
                yield {
                    "id": number,
                    "content": self.tokens[number],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": normalized,
                    "special": kind != Type.USER_DEFINED,
                }

    def _ends(self, *, bos: bool, otherwise: Any, eos: bool = False) -> Any:
        """The post_processor that adds tokens before and after a text; `otherwise` if it would add none."""
        adds = self._flag("add_bos_token", default=bos), self._flag("add_eos_token", default=eos)
        first, last = (
            self._token_id(key) if add else None
            for key, add in zip(("bos_token_id", "eos_token_id"), adds, strict=True)
        )
        if first is None and last is None:
            return otherwise
        return _between(self.tokens, first, last)

    def _merges(self) -> list[list[str]]:
        """The merges of the file, as pairs. Raises ModelError unless both parts and the result of each are tokens."""
        found = []
        for text in self._texts("merges"):
            left = text[:1] + text[1:].partition(" ")[0]  # a part may begin with a space
            right = text[len(left) + 1 :]
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.error(f"{KEY}merges has {text[:80]!r}, whose parts are not tokens")
            found.append([left, right])
        return found

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Merges, the highest score of the result first, for all ways to make a token of two others: SentencePiece
        merges the pair whose result has the highest score."""
        scores, found = self._scores(), []
        for number, token in enumerate(self.tokens):
            if self.types[number] in (Type.UNKNOWN, Type.CONTROL):
                continue
            splits = ((token[:at], token[at:]) for at in range(1, len(token)))
            pairs = [(left, right) for left, right in splits if left in self.ids and right in self.ids]
            pairs.sort(key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))
            found += [(scores[number], pair) for pair in pairs]
        found.sort(key=lambda each: each[0], reverse=True)
        return [pair for _, pair in found]

    # ---- values

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.file}: {problem}")

    def _texts(self, key: str) -> Sequence[str]:
        found = self._array(key)
        texts = [] if found is None else found.texts()
        if any(len(text) > MAX_TOKEN_CHARS for text in texts):
            raise self.error(f"{KEY}{key} has a string of more than {MAX_TOKEN_CHARS} characters")
        return texts

    def _numbers(self, key: str) -> Sequence[float]:
        found = self._array(key)
        numbers: Sequence[float] = [] if found is None else found.numbers()
        if len(numbers) not in (0, len(self.tokens)):
            raise self.error(f"{KEY}{key} has {len(numbers)} numbers for {len(self.tokens)} tokens")
        return numbers

    def _array(self, key: str) -> Array | None:
        found = self.values.get(f"{KEY}{key}")
        if found is not None and not isinstance(found, Array):
            raise self.error(f"{KEY}{key} is not an array")
        return found

    def _flag(self, key: str, *, default: bool) -> bool:
        found: Value | None = self.values.get(f"{KEY}{key}")
        return found if isinstance(found, bool) else default

    def _token_id(self, *keys: str) -> int | None:
        """The id of a token: that of the first of `keys` with a valid id. A key in brackets is a token itself; any
        other is a key of the file."""
        for key in keys:
            found = self.ids.get(key) if key.startswith("[") else self.values.get(f"{KEY}{key}")
            if isinstance(found, int) and 0 <= found < len(self.tokens):
                return found
        return None

    def _scores(self) -> Sequence[float]:
        scores = self._numbers("scores")
        if len(scores) != len(self.tokens):
            raise self.error(f"{KEY}scores has {len(scores)} numbers for {len(self.tokens)} tokens")
        return scores

    def _bytes_of_map(self, array: Array) -> Iterator[int]:
        if len(array) > MAX_MAP_BYTES:
            raise self.error(f"{KEY}precompiled_charsmap has {len(array)} bytes; it may have {MAX_MAP_BYTES}")
        for number in array.numbers():
            if not isinstance(number, int) or not -128 <= number <= 255:
                raise self.error(f"{KEY}precompiled_charsmap has {number!r}, which is not a byte")
            yield number


def _pieces_to_text(*, strips: bool = False) -> dict[str, Any]:
    """The decoder of SentencePiece's BPE. `strips`: whether it removes the space that was put before the text."""
    words = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []
    return {"type": "Sequence", "decoders": [words, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]}


def _between(tokens: Sequence[str], first: int | None, last: int | None) -> dict[str, Any]:
    """A post_processor that puts both texts of a pair between the tokens `first` and `last`."""
    before, behind = ([] if each is None else [_part(tokens[each])] for each in (first, last))
    sequences = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    single = [*before, sequences[0], *behind]
    return _template(single, [*single, *before, sequences[1], *behind], tokens, (first, last))


def _around(tokens: Sequence[str], first: int | None, last: int | None) -> dict[str, Any]:
    """BERT's post_processor: `first`, a text and `last`; for a pair, the second text and `last` once more follow."""
    before, behind = ([] if each is None else [_part(tokens[each])] for each in (first, last))
    end = [] if last is None else [_part(tokens[last], type_id=1)]
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *behind]
    return _template(single, [*single, {"Sequence": {"id": "B", "type_id": 1}}, *end], tokens, (first, last))


def _template(single: list[Any], pair: list[Any], tokens: Sequence[str], ids: tuple[int | None, ...]) -> dict[str, Any]:
    special = {
        tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
        for number in ids
        if number is not None
    }
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _part(token: str, *, type_id: int = 0) -> Mapping[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}
