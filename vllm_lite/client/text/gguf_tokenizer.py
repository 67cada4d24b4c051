"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json: BPE of bytes, or SentencePiece's BPE.

Keys are `tokenizer.ggml.model`, `pre`, `tokens`, `scores`, `merges`, `token_type` and some ids and flags, as
https://github.com/ggml-org/ggml documents them.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.checkpoint.gguf.header import Array, Value, read_metadata
from vllm_lite.client.text.pre_tokenizers import BYTES, WORDS, Words
from vllm_lite.errors import ModelError

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
MAX_TOKENS = 1 << 21
MAX_TOKEN_CHARS = 4096
SPACE = "▁"
"""What SentencePiece writes for a space."""
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class Type(IntEnum):
    """`token_type`: what a token is."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class GgufTokenizer:
    """What a file says of its tokens, checked."""

    def __init__(self, file: Path) -> None:
        """Raises ModelError for a file whose tokenizer is damaged, or of a kind that is not supported."""
        self.file, self.values = file, read_metadata(file)
        self.model = self.values.get(f"{KEY}model")
        makers = {"gpt2": self._bytes, "llama": self._pieces}
        if self.model not in makers:
            raise self.error(f"its tokenizer {self.model!r} is not supported; supported: {', '.join(makers)}")
        self.tokens = self._texts("tokens")
        if not self.tokens or len(self.tokens) > MAX_TOKENS:
            raise self.error(f"{KEY}tokens has {len(self.tokens)} tokens; it must have 1 to {MAX_TOKENS}")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.types = self._numbers("token_type") or [1] * len(self.tokens)
        self.make = makers[str(self.model)]

    def write(self, folder: Path) -> None:
        """Write both files into `folder`."""
        (folder / "tokenizer.json").write_bytes(msgspec.json.encode(self.make()))
        (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(self.config()))

    def config(self) -> dict[str, Any]:
        """tokenizer_config.json: special tokens, and chat templates."""
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

    # ---- the two kinds

    def _bytes(self) -> dict[str, Any]:
        name = self.values.get(f"{KEY}pre")
        if name not in WORDS:
            known = f"supported: {', '.join(WORDS)}, or any tokenizer.json beside the file"
            raise self.error(f"how its tokenizer cuts words ({KEY}pre {name!r}) is not known; {known}")
        words: Words = WORDS[str(name)]
        steps = words.steps()
        return {
            "added_tokens": list(self._added(normalized=False)),
            "normalizer": {"type": "NFC"} if words.nfc else None,
            "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
            "post_processor": self._ends(bos=words.adds_bos, otherwise=BYTES),
            "decoder": BYTES,
            "model": {
                "type": "BPE",
                "vocab": self.ids,
                "merges": self._merges(),
                "ignore_merges": words.whole_words,
            },
        }

    def _pieces(self) -> dict[str, Any]:
        prefix = self._flag("add_space_prefix", default=True)
        unknown = self._token_id("unknown_token_id")
        before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        words = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        return {
            "added_tokens": list(self._added(normalized=False)),
            "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
            "pre_tokenizer": None,
            "post_processor": self._ends(bos=True, otherwise=None),
            "decoder": {"type": "Sequence", "decoders": [words, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
            "model": {
                "type": "BPE",
                "vocab": self.ids,
                "merges": self._merges_by_score(),
                "unk_token": None if unknown is None else self.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": "<0x00>" in self.ids,
            },
        }

    def _added(self, *, normalized: bool) -> Iterator[dict[str, Any]]:
        """Tokens that are found in texts before these are cut."""
        for number, kind in enumerate(self.types):
            if kind in (Type.UNKNOWN, Type.CONTROL, Type.USER_DEFINED):
                yield {
                    "id": number,
                    "content": self.tokens[number],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": normalized,
                    "special": kind != Type.USER_DEFINED,
                }

    def _ends(self, *, bos: bool, otherwise: Any) -> Any:
        """The post_processor: which tokens are put before and behind a text."""
        adds = self._flag("add_bos_token", default=bos), self._flag("add_eos_token", default=False)
        ids = [
            self._token_id(key) if add else None
            for key, add in zip(("bos_token_id", "eos_token_id"), adds, strict=True)
        ]
        first, last = ([_part(self.tokens[number])] if number is not None else [] for number in ids)
        if not first and not last:
            return otherwise
        special = {
            self.tokens[number]: {"id": self.tokens[number], "ids": [number], "tokens": [self.tokens[number]]}
            for number in ids
            if number is not None
        }
        sequences = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
        return {
            "type": "TemplateProcessing",
            "single": [*first, sequences[0], *last],
            "pair": [*first, sequences[0], *last, *first, sequences[1], *last],
            "special_tokens": special,
        }

    def _merges(self) -> list[list[str]]:
        """Those whose parts and result are tokens."""
        found = []
        for text in self._texts("merges"):
            left = text[:1] + text[1:].partition(" ")[0]  # a part may begin with a space
            right = text[len(left) + 1 :]
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.error(f"{KEY}merges has {text[:80]!r}, whose parts are no tokens")
            found.append([left, right])
        return found

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece merges the pair whose result has the highest score, whatever two parts that is made of."""
        scores = self._numbers("scores")
        if len(scores) != len(self.tokens):
            raise self.error(f"{KEY}scores has {len(scores)} numbers for {len(self.tokens)} tokens")
        found = []
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
            raise self.error(f"{KEY}{key} is no array")
        return found

    def _flag(self, key: str, *, default: bool) -> bool:
        found: Value | None = self.values.get(f"{KEY}{key}")
        return found if isinstance(found, bool) else default

    def _token_id(self, key: str) -> int | None:
        found = self.values.get(f"{KEY}{key}")
        if not isinstance(found, int) or not 0 <= found < len(self.tokens):
            return None
        return found


def _part(token: str) -> Mapping[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}
