r"""Halves of surrogate pairs in JSON, as clients leave them that cut a text between the two escapes of one character.

`"\ud83d"` is JSON, but no text: no decoder for UTF-8 takes it. A session whose history holds one would be refused with
every later request, so each half is replaced by U+FFFD, as browsers do.
"""

import re

PIECE_BYTES = 256 * 1024
"""Looked through in one go, in less than 20 ms: a regular expression lets no other thread run."""
MAX_HALVES = 1 << 16
_BACKSLASH = b"\\\\"
_MARK = b"\xff\xff"
"""Temporary replacement for an escaped backslash, so that every other backslash begins an escape. No valid UTF-8
contains it."""
_PAIR_BYTES = 12
_HEX = rb"[0-9a-fA-F]"
_HIGH, _LOW = (rb"\\u[dD][%b]%b%b" % (third, _HEX, _HEX) for third in (b"89abAB", b"c-fC-F"))
_HIGH_AT = re.compile(_HIGH)
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB]%b%b(?!%b)|[c-fC-F]%b%b(?<!%b%b))" % (_HEX, _HEX, _LOW, _HEX, _HEX, _HIGH, _LOW)
)
_REPLACEMENT = rb"\\ufffd"


def without_halves(data: bytes) -> bytes:
    """Return JSON with each escape of half a pair replaced, of MAX_HALVES at most. Bytes that are not UTF-8 stay as
    they are."""
    if b"\xff" in data:
        return data
    whole, carried, left = [], b"", MAX_HALVES
    for start in range(0, len(data), PIECE_BYTES):
        piece = (carried + data[start : start + PIECE_BYTES]).replace(_BACKSLASH, _MARK)
        cut = len(piece) if start + PIECE_BYTES >= len(data) else _end_of_whole(piece)
        carried = piece[cut:].replace(_MARK, _BACKSLASH)
        mended, count = _HALF.subn(_REPLACEMENT, piece[:cut], left) if left else (piece[:cut], 0)
        left -= count
        whole.append(mended.replace(_MARK, _BACKSLASH))
    return b"".join(whole)


def _end_of_whole(piece: bytes) -> int:
    """Return the place in `piece` of an escape at its end that may continue in the next piece; its length if there is
    none."""
    cut = piece.find(b"\\", max(0, len(piece) - _PAIR_BYTES + 1))
    if cut < 0:
        return len(piece)
    return cut - _PAIR_BYTES // 2 if _HIGH_AT.match(piece, max(0, cut - _PAIR_BYTES // 2), cut) else cut
