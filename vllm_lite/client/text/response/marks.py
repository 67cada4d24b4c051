"""Marks: single characters that replace added tokens, so that text that only spells a token differs from the token.

A parser looks for literals and patterns in text. Here every added token that a format names becomes one lone surrogate,
a character that no decoded text contains, in the text as well as in the literals and patterns. A literal of one token
is therefore one character, and one search finds literals of tokens, of text and of both.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from vllm_lite.client.text.response.events import OutputPiece

FIRST_MARK, LAST_MARK = 0xD800, 0xDFFF
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_TOKEN_SHAPE = re.compile(r"[<\[|｜\]].*[>\]|｜\[]", re.DOTALL)  # noqa: RUF001 - DeepSeek has such letters
"""Shape of added tokens that are literals of a format. Others are words or white space, which stay text."""


class Marks:
    """The added tokens that the literals of one format name, each with its mark. Nothing changes after the start."""

    def __init__(
        self, named: Iterable[str], added_tokens: Mapping[str, int] | None = None, special_ids: Iterable[int] = ()
    ) -> None:
        """`named` are the literals and patterns of a format, `added_tokens` maps texts to ids."""
        everything = "\n".join(named)
        candidates = [text for text in added_tokens or {} if _TOKEN_SHAPE.fullmatch(text)]
        found = [text for text in candidates if any(form in everything for form in (text, *_spellings(text)))]
        found = sorted(found, key=len, reverse=True)[: LAST_MARK - FIRST_MARK]  # longest first: one may contain another
        self._mark_of = {text: chr(FIRST_MARK + place) for place, text in enumerate(found)}
        self._by_id = {(added_tokens or {})[text]: mark for text, mark in self._mark_of.items()}
        self.spelled = {ord(mark): text for text, mark in self._mark_of.items()}
        self._escaped = {ord(mark): json.dumps(text)[1:-1] for text, mark in self._mark_of.items()}
        self._special_ids = frozenset(special_ids)

    def literal(self, text: str) -> str:
        """Replace the tokens in a literal, or in the text of a prompt, in which every spelling of a token is the
        token."""
        for token, mark in self._mark_of.items():
            text = text.replace(token, mark)
        return text

    def pattern(self, source: str) -> str:
        """Replace the tokens in a regular expression, in which they may be escaped in several ways."""
        for token, mark in self._mark_of.items():
            for form in _spellings(token):
                source = source.replace(form, mark)
        return source

    def text(self, pieces: Sequence[OutputPiece]) -> str:
        """Join pieces, with a mark for each token that the format names. Other special tokens are dropped."""
        return "".join([self._one(piece) for piece in pieces])

    def _one(self, piece: OutputPiece) -> str:
        if piece.token_id is not None:
            mark = self._by_id.get(piece.token_id)
            if mark is not None:
                return mark
            if piece.token_id in self._special_ids:
                return ""
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", piece.text)

    def spell(self, text: str) -> str:
        """Replace marks by the texts of their tokens."""
        return text if text.isascii() else text.translate(self.spelled)

    def spell_in_json(self, text: str) -> str:
        """Replace marks, which must all be in JSON strings, by the texts of their tokens."""
        return text if text.isascii() else text.translate(self._escaped)

    def is_text(self, text: str) -> bool:
        """Whether `text` contains no mark."""
        return text.isascii() or _SURROGATES.search(text) is None


def _spellings(token: str) -> list[str]:
    """List the spellings of a token in a regular expression; unescaped only if that has the same meaning."""
    some = "".join(f"\\{letter}" if letter in "|[]()" else letter for letter in token)
    forms = [re.escape(token), some]
    if re.escape(token) == token or not re.search(r"[|\[\](){}.*+?^$\\]", token):
        forms.append(token)
    return sorted(set(forms), key=len, reverse=True)
