"""Checks one JSON value while it arrives: the text sent so far is always the beginning of a valid value.

Two deviations are accepted and corrected: control characters inside strings are escaped, and a dialect may have keys
without quotes or strings between other delimiters.
"""

import json
import re
from dataclasses import dataclass

import regex

MAX_DEPTH = 128
MAX_SCALAR_CHARS = 1024

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NAME = re.compile(r"\w+")
_SCALAR = re.compile(r"[-+.\w]+")
_VALID_SCALAR = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """A model's output contradicts its format. `place`: index of the first wrong character."""

    def __init__(self, place: int) -> None:
        super().__init__(f"malformed at character {place}")
        self.place = place


@dataclass(frozen=True, slots=True)
class Dialect:
    """Deviations from JSON: keys without quotes, and strings between other single characters."""

    bare_keys: bool = False
    delimiters: tuple[tuple[str, str], ...] = ()
    spelled: dict[int, str] | None = None


JSON = Dialect()


class JsonValue:
    """Reads one value. `is_done` is true once it is complete; a number is complete when another character follows
    it."""

    def __init__(self, dialect: Dialect = JSON) -> None:
        self.is_done = False
        self._dialect = dialect
        self._closers = dict(dialect.delimiters)
        self._stack: list[str] = []
        self._step = self._value
        self._is_key = False
        self._closer = ""
        self._scalar = ""
        self._num_hex = 0
        self._may_end = False

    @property
    def in_string(self) -> bool:
        return self._step in (self._string, self._escape, self._hex, self._other_string)

    def feed(self, text: str, place: int, out: list[str]) -> int:
        """Read `text` from `place` on, and append its JSON to `out`. Returns the index after the value, or the end of
        the text. Raises Malformed, with `out` filled up to the error.
        """
        while place < len(text) and not self.is_done:
            place = self._step(text, place, out)
        return place

    def end(self) -> None:
        """End the text. Raises Malformed if the value is not complete."""
        if self._step == self._in_scalar and not self.is_done:
            self._end_scalar(0)
        if not self.is_done:
            raise Malformed(0)

    # ---- one step each: they read at least one character, or change the step

    def _skip_space(self, text: str, place: int, out: list[str]) -> int:
        space = _SPACE.match(text, place)
        if space is None:
            return place
        out.append(space[0])
        return space.end()

    def _value(self, text: str, place: int, out: list[str]) -> int:
        place = self._skip_space(text, place, out)
        if place == len(text):
            return place
        letter = text[place]
        if letter == "]" and self._may_end:
            return self._close(letter, place, out)
        self._may_end = False
        if letter in "{[":
            if len(self._stack) >= MAX_DEPTH:
                raise Malformed(place)
            self._stack.append(letter)
            self._may_end = True
            self._step = self._key if letter == "{" else self._value
            out.append(letter)
            return place + 1
        if letter == '"' or letter in self._closers:
            return self._open_string(letter, place, out)
        self._scalar, self._step = "", self._in_scalar
        return place

    def _key(self, text: str, place: int, out: list[str]) -> int:
        place = self._skip_space(text, place, out)
        if place == len(text):
            return place
        letter = text[place]
        if letter == "}" and self._may_end:
            return self._close(letter, place, out)
        self._may_end = False
        self._is_key = True
        if letter == '"' or letter in self._closers:
            return self._open_string(letter, place, out)
        if not self._dialect.bare_keys or not _NAME.match(letter):
            raise Malformed(place)
        self._step = self._bare_key
        out.append('"')
        return place

    def _bare_key(self, text: str, place: int, out: list[str]) -> int:
        name = _NAME.match(text, place)
        if name is not None:
            out.append(name[0])
            return name.end()
        out.append('"')
        self._is_key, self._step = False, self._colon
        return place

    def _colon(self, text: str, place: int, out: list[str]) -> int:
        place = self._skip_space(text, place, out)
        if place == len(text):
            return place
        if text[place] != ":":
            raise Malformed(place)
        out.append(":")
        self._step = self._value
        return place + 1

    def _behind(self, text: str, place: int, out: list[str]) -> int:
        """Read the text after a value inside an object or a list."""
        place = self._skip_space(text, place, out)
        if place == len(text):
            return place
        letter = text[place]
        if letter != ",":
            return self._close(letter, place, out)
        out.append(letter)
        self._step = self._key if self._stack[-1] == "{" else self._value
        return place + 1

    def _close(self, letter: str, place: int, out: list[str]) -> int:
        if {"{": "}", "[": "]"}[self._stack[-1]] != letter:
            raise Malformed(place)
        self._stack.pop()
        self._may_end = False
        out.append(letter)
        self._complete()
        return place + 1

    def _complete(self) -> None:
        if self._is_key:
            self._is_key, self._step = False, self._colon
        elif self._stack:
            self._step = self._behind
        else:
            self.is_done = True

    # ---- strings and scalars

    def _open_string(self, letter: str, place: int, out: list[str]) -> int:
        self._closer = self._closers.get(letter, letter)
        self._step = self._string if letter == '"' else self._other_string
        out.append('"')
        return place + 1

    def _string(self, text: str, place: int, out: list[str]) -> int:
        plain = _PLAIN.match(text, place)
        if plain is not None:
            out.append(plain[0])
            return plain.end()
        letter = text[place]
        if letter == '"':
            out.append(letter)
            self._complete()
        elif letter == "\\":
            self._step = self._escape  # sent with the escaped character, so that the text can be cut anywhere
        else:
            out.append(json.dumps(letter)[1:-1])
        return place + 1

    def _escape(self, text: str, place: int, out: list[str]) -> int:
        letter = text[place]
        if letter not in '"\\/bfnrtu':
            raise Malformed(place)
        out.append("\\" + letter)
        self._step, self._num_hex = (self._hex, 4) if letter == "u" else (self._string, 0)
        return place + 1

    def _hex(self, text: str, place: int, out: list[str]) -> int:
        if text[place] not in _HEX:
            raise Malformed(place)
        out.append(text[place])
        self._num_hex -= 1
        if not self._num_hex:
            self._step = self._string
        return place + 1

    def _other_string(self, text: str, place: int, out: list[str]) -> int:
        end = text.find(self._closer, place)
        part = text[place:] if end < 0 else text[place:end]
        out.append(json.dumps(part.translate(self._dialect.spelled or {}), ensure_ascii=False)[1:-1])
        if end < 0:
            return len(text)
        out.append('"')
        self._complete()
        return end + 1

    def _in_scalar(self, text: str, place: int, out: list[str]) -> int:
        more = _SCALAR.match(text, place)
        if more is None:
            self._end_scalar(place)
            return place
        for end in range(place + 1, more.end() + 1):
            self._scalar += text[end - 1]
            if len(self._scalar) > MAX_SCALAR_CHARS or not _VALID_SCALAR.fullmatch(self._scalar, partial=True):
                raise Malformed(end - 1)
            out.append(text[end - 1])
        return more.end()

    def _end_scalar(self, place: int) -> None:
        if not _VALID_SCALAR.fullmatch(self._scalar):
            raise Malformed(place)
        self._complete()
