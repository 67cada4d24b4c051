"""Parser of regular expressions of JSON schemas: ECMA syntax, with Python's additions.

It accepts features that llguidance's parser does not: look-around, word boundaries, and escapes that Rust lacks. Lazy
quantifiers match the same texts as greedy ones.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import regex

Ranges = tuple[tuple[int, int], ...]
"""Characters as inclusive ranges of code points, sorted and disjoint."""

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All characters, without surrogates."""
MAX_DEPTH = 50
MAX_REPEAT = 1000


class NotHeldError(Exception):
    """A regular expression that cannot be rewritten, with the reason. `is_understood`: it could be parsed."""

    is_understood = True


class NotReadError(NotHeldError):
    """A regular expression that is invalid, or uses unsupported features."""

    is_understood = False


@dataclass(frozen=True, slots=True)
class Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """Look-ahead: `body` must match here, or must not if it `is_negative`."""

    body: "Node"
    is_negative: bool


@dataclass(frozen=True, slots=True)
class Behind:
    """Look-behind at one character, which must be in `ranges`; if `is_negative`, it must not, or there must be none."""

    ranges: Ranges
    is_negative: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """A position: "^", "$", "b" for a word boundary, "B" for a non-boundary."""

    kind: str


Node = Chars | Seq | Alt | Repeat | Ahead | Behind | Edge


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and join adjacent ones."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def outside(ranges: Ranges) -> Ranges:
    found, at = [], 0
    for first, last in merged((*ranges, (0xD800, 0xDFFF))):
        if first > at:
            found.append((at, first - 1))
        at = last + 1
    if at <= ALL[-1][1]:
        found.append((at, ALL[-1][1]))
    return tuple(found)


def holds(ranges: Ranges, char: int) -> bool:
    place = bisect_right(ranges, (char, ALL[-1][1])) - 1
    return place >= 0 and ranges[place][0] <= char <= ranges[place][1]


DIGIT = merged([(48, 57)])
WORD = merged([(48, 57), (65, 90), (95, 95), (97, 122)])
SPACE = merged([(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)])
SPACE = merged([*SPACE, (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
DOT = outside(((10, 10),))
"""Everything but a line break, as in all regular expressions here."""

_CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE, "D": outside(DIGIT), "W": outside(WORD), "S": outside(SPACE)}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "0": 0}
_EDGES = {"b": "b", "B": "B", "A": "^", "Z": "$", "z": "$"}
_HEX = {"x": 2, "u": 4, "U": 8}
_COUNT = regex.compile(r"\{(\d*)(,?)(\d*)\}")
_PROPERTY = regex.compile(r"\{(\^?[A-Za-z_]+(?:=[A-Za-z_]+)?)\}")
_NAMED = regex.compile(r"\?P?<[A-Za-z_]\w*>|\?:")
_LOOK = regex.compile(r"\?(<?)([=!])")


def read_tree(pattern: str) -> Node:
    """Parse a regular expression. Raises NotReadError."""
    reader = _Reader(pattern)
    node = reader.alternatives(0)
    if not reader.is_at_end:
        reader.fail("a closing bracket without its opening one")
    return node


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def fail(self, problem: str) -> NoReturn:
        raise NotReadError(f"column {self._at + 1}: {problem}")

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self.fail("groups are nested too deeply")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while not self.is_at_end and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._one(depth)))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _one(self, depth: int) -> Node:
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return Chars(self._class())
        if char in "^$":
            return Edge(char)
        if char == ".":
            return Chars(DOT)
        if char in "*+?":
            self.fail("nothing stands before the quantifier")
        if char == "\\":
            if not self.is_at_end and (kind := _EDGES.get(self._text[self._at])) is not None:
                self._at += 1
                return Edge(kind)
            return Chars(self._escape())
        return Chars(((ord(char), ord(char)),))

    def _group(self, depth: int) -> Node:
        if (found := _LOOK.match(self._text, self._at)) is not None:
            self._at = found.end()
            body = self._closed(depth)
            is_negative = found[2] == "!"
            if not found[1]:
                return Ahead(body, is_negative)
            if not isinstance(body, Chars):
                self.fail("look-behind at more than one character")
            return Behind(body.ranges, is_negative)
        if (found := _NAMED.match(self._text, self._at)) is not None:
            self._at = found.end()
        elif self._text.startswith("?", self._at):
            self.fail("a group of this kind cannot be held")
        return self._closed(depth)

    def _closed(self, depth: int) -> Node:
        body = self.alternatives(depth + 1)
        if not self._take(")"):
            self.fail("a group is not closed")
        return body

    def _repeated(self, node: Node) -> Node:
        while not self.is_at_end:
            least, most = 0, None
            found = _COUNT.match(self._text, self._at)
            if found is not None and (found[1] or found[3]):
                least = int(found[1] or 0)
                most = least if not found[2] else int(found[3]) if found[3] else None
                self._at = found.end()
            elif self._take("?"):
                most = 1
            elif self._take("+"):
                least = 1
            elif not self._take("*"):
                return node
            if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
                self.fail(f"a count goes from 0 to {MAX_REPEAT}, and not backwards")
            node = Repeat(node, least, most)
            if self._take("+"):
                self.fail("a possessive quantifier cannot be held")
            self._take("?")  # lazy quantifiers match the same texts
        return node

    def _class(self) -> Ranges:
        is_negative = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._member()
                if not (_is_one(first) and _is_one(last)):
                    found += [*first, (ord("-"), ord("-")), *last]
                elif first > last:
                    self.fail("a range of a class goes from one character to a later one")
                else:
                    found.append((first[0][0], last[0][1]))
            else:
                found += first
        ranges = merged(found)
        return outside(ranges) if is_negative else ranges

    def _member(self) -> Ranges:
        char = self._next()
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self._take("b"):
            return ((8, 8),)
        return self._escape()

    def _escape(self) -> Ranges:
        char = self._next()
        if (ranges := _CLASSES.get(char)) is not None:
            return ranges
        if char in "pP":
            found = _PROPERTY.match(self._text, self._at)
            if found is None:
                self.fail("a property has its name between braces")
            self._at = found.end()
            ranges = property_ranges(found[1])
            return outside(ranges) if char == "P" else ranges
        code = self._code(char)
        if 0xD800 <= code <= 0xDFFF or code > ALL[-1][1]:
            self.fail("a character outside of Unicode, or half a surrogate pair")
        return ((code, code),)

    def _code(self, char: str) -> int:
        if char == "c" and not self.is_at_end and self._text[self._at].isascii() and self._text[self._at].isalpha():
            return ord(self._next()) % 32
        if char in _HEX:
            wide = regex.compile(rf"\{{([0-9A-Fa-f]{{1,6}})\}}|([0-9A-Fa-f]{{{_HEX[char]}}})")
            found = wide.match(self._text, self._at)
            if found is None:
                self.fail(f"\\{char} without its digits")
            self._at = found.end()
            return int(found[1] or found[2], 16)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum():
            self.fail(f"the escape \\{char} cannot be held")
        return ord(char)

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self.is_at_end:
            self.fail("something is missing at the end")
        self._at += 1
        return self._text[self._at - 1]


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


@lru_cache(64)
def property_ranges(name: str) -> Ranges:
    """Return the characters of a Unicode property; takes 0.2 s for the first, later a few ms. Raises NotReadError for
    an unknown one."""
    try:
        runs = regex.compile(rf"[\p{{{name}}}]+")
    except regex.error as error:
        raise NotReadError(f"the Unicode property {name!r} is not known") from error
    found: list[tuple[int, int]] = []
    for first, last in ALL:
        text = "".join(map(chr, range(first, last + 1)))
        found += [(first + run.start(), first + run.end() - 1) for run in runs.finditer(text)]
    return merged(found)


_SPECIAL = frozenset("\\^$.|?*+()[]{}-&~#/")


def written(node: Node) -> str:
    """Format a tree without look-around and word boundaries in Rust's syntax."""
    match node:
        case Chars(ranges):
            return chars(ranges)
        case Seq(parts):
            return "".join(f"(?:{written(part)})" if isinstance(part, Alt) else written(part) for part in parts)
        case Alt(parts):
            return "|".join(map(written, parts))
        case Repeat(part, least, most):
            inner = written(part)
            if not isinstance(part, Chars):
                inner = f"(?:{inner})"
            return inner + counts(least, most)
        case Edge(kind) if kind in "^$":
            return kind
    raise NotHeldError("it has look-around")


def counts(least: int, most: int | None) -> str:
    """Format a quantifier."""
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if known is not None:
        return known
    return f"{{{least}}}" if most == least else f"{{{least},{'' if most is None else most}}}"


def chars(ranges: Ranges) -> str:
    """Format a character class."""
    if not ranges:
        return r"[^\s\S]"
    if ranges == ALL:
        return r"[\s\S]"
    if _is_one(ranges):
        return _char(ranges[0][0])
    if len(ranges) > 1 and len(inverse := outside(ranges)) < len(ranges):
        return f"[^{_members(inverse)}]"
    return f"[{_members(ranges)}]"


def _members(ranges: Ranges) -> str:
    return "".join(_char(first) + (f"-{_char(last)}" if last > first else "") for first, last in ranges)


def _char(code: int) -> str:
    char = chr(code)
    if char in _SPECIAL:
        return f"\\{char}"
    return char if char.isprintable() and char.isascii() else f"\\x{{{code:X}}}"
