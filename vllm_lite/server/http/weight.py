"""Estimates the memory that a body of JSON takes once it is decoded, from its bytes as they come.

A body becomes far larger than it is: `{"a":0},` is 8 bytes of it and 230 of memory, and one emoji in a text makes each
of its characters take 4 bytes. So the structure outside of texts is counted, and the widest character is looked for.
"""

import re
from typing import NamedTuple

COMMA_BYTES = 64
"""Memory for each comma outside of texts: a number or a short text of a list."""
NESTED_BYTES = 128
"""Memory for each list, object and named field."""
_WIDEST = re.compile(rb"[\xf0-\xf4]|\\u[dD]")
"""Characters beyond the first 65,536, as they are or as pairs of escapes."""


class Weight(NamedTuple):
    """Size of a body, or of a part of it.

    num_bytes   as it was sent
    num_commas  outside of texts: a list of numbers has one for each
    num_nested  lists, objects and fields of objects
    width       most bytes that a character of its texts takes in memory: 1, 2 or 4
    """

    num_bytes: int = 0
    num_commas: int = 0
    num_nested: int = 0
    width: int = 1

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that it takes when it is decoded."""
        return self.num_bytes * self.width + self.num_commas * COMMA_BYTES + self.num_nested * NESTED_BYTES

    def plus(self, other: "Weight") -> "Weight":
        return Weight(
            self.num_bytes + other.num_bytes,
            self.num_commas + other.num_commas,
            self.num_nested + other.num_nested,
            max(self.width, other.width),
        )


class Scale:
    """Weighs JSON that comes in pieces, cut anywhere: some 8 ns for each byte of it."""

    def __init__(self) -> None:
        self.weight = Weight()
        self._in_text = False
        self._cut = b""
        """A backslash at the end of the piece before, whose other half comes with the next one."""
        self._knows_texts = True
        self._tail = b""
        """Last two bytes of the piece before, where an escape may have begun."""

    def feed(self, piece: bytes) -> None:
        """Weigh the next piece."""
        outside = self._outside(piece)
        nested = outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        part = Weight(len(piece), outside.count(b","), nested, self._width(self._tail + piece))
        self._tail = piece[-2:]
        self.weight = self.weight.plus(part)

    def _outside(self, piece: bytes) -> bytes:
        """Return what of the piece stands outside of texts. In UTF-16 and UTF-32, which have bytes of 0 where UTF-8 has
        none, texts are not found, and all counts as outside."""
        if self._knows_texts and b"\0" in piece:
            self._knows_texts = False
        if not self._knows_texts:
            return piece
        piece = self._cut + piece
        self._cut = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._cut = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[1::2] if self._in_text else parts[::2])
        self._in_text ^= len(parts) % 2 == 0
        return outside

    def _width(self, piece: bytes) -> int:
        if self.weight.width == 4 or (piece.isascii() and b"\\" not in piece):
            return self.weight.width
        if _WIDEST.search(piece) is not None:
            return 4
        return 1 if piece.isascii() and b"\\u" not in piece else 2


def weighed(data: bytes | memoryview, piece_bytes: int = 64 * 1024) -> Weight:
    """Weigh JSON that is whole."""
    scale = Scale()
    for start in range(0, len(data), piece_bytes):
        scale.feed(bytes(data[start : start + piece_bytes]))
    return scale.weight
