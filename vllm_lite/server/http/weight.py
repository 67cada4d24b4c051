"""Estimates the memory of a decoded JSON body from its bytes, while they arrive.

A decoded body is far larger: `{"a":0},` is 8 bytes on the wire and 230 in memory, and one emoji in a string makes each
of its characters take 4 bytes. So the structure outside of strings is counted, and the widest character found.
"""

import re
from typing import NamedTuple

COMMA_BYTES = 64
"""Bytes of memory for each comma outside of strings: a number or a short string of a list."""
NESTED_BYTES = 128
"""Bytes of memory for each list, object and named field."""
PIECE_BYTES = 64 * 1024
"""Bytes of complete JSON that are weighed at a time."""
_WIDEST = re.compile(rb"[\xf0-\xf4]|\\u[dD]")
"""Characters beyond U+FFFF, in UTF-8 or as pairs of escapes."""


class Weight(NamedTuple):
    """Size of a body, or of a part of it.

    num_bytes   bytes as sent
    num_commas  commas outside of strings: a list of numbers has one for each
    num_nested  lists, objects and fields of objects
    width       bytes that the widest character of its strings takes in memory: 1, 2 or 4
    """

    num_bytes: int = 0
    num_commas: int = 0
    num_nested: int = 0
    width: int = 1

    @property
    def memory_bytes(self) -> int:
        """Upper bound of its memory when decoded."""
        return self.num_bytes * self.width + self.num_commas * COMMA_BYTES + self.num_nested * NESTED_BYTES

    def plus(self, other: "Weight") -> "Weight":
        return Weight(
            self.num_bytes + other.num_bytes,
            self.num_commas + other.num_commas,
            self.num_nested + other.num_nested,
            max(self.width, other.width),
        )


class Scale:
    """Weighs JSON that arrives in pieces, cut anywhere; takes about 8 ns per byte."""

    def __init__(self) -> None:
        self.weight = Weight()
        self._in_text = False
        self._cut = b""
        """A backslash at the end of the previous piece, whose other half is in the next one."""
        self._knows_texts = True
        self._tail = b""
        """Last two bytes of the previous piece, where an escape may have begun."""

    def feed(self, piece: bytes) -> None:
        outside = self._outside(piece)
        nested = outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        part = Weight(len(piece), outside.count(b","), nested, self._width(self._tail + piece))
        self._tail = piece[-2:]
        self.weight = self.weight.plus(part)

    def _outside(self, piece: bytes) -> bytes:
        """Return the bytes of the piece outside of strings. In UTF-16 and UTF-32, recognized by zero bytes, strings are
        not found, and all bytes count as outside."""
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


def weighed(data: bytes | memoryview) -> Weight:
    scale = Scale()
    for start in range(0, len(data), PIECE_BYTES):
        scale.feed(bytes(data[start : start + PIECE_BYTES]))
    return scale.weight
