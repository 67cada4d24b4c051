"""Moments: an engine's states at many moments, in a file, so that memory does not grow with their number.

Every EVERY-th moment is stored completely, the others as changes; so any moment is read from one piece of the file.
Pieces are compressed, as successive rows are similar.
"""

import tempfile
import threading
import zlib
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_lite.server.live.snapshot import Snapshot

EVERY = 64
SLICE = 256
"""Number of blocks compared at a time."""
LEVEL = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Any, int, list[tuple[int, bytes]]]).decode
_pieces = msgspec.msgpack.Decoder(list[bytes]).decode


class Moments:
    """A file of moments. One thread adds moments, others read them."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until close()
        self._starts = array("Q")
        self._end = 0
        self._open: list[bytes] = []
        """The moments of the piece that is not written yet."""
        self._blocks = b""
        self._lock = threading.Lock()
        self._read: tuple[int, list[bytes]] = (-1, [])
        """The last piece read: playback continues in it."""

    def __len__(self) -> int:
        return len(self._starts) * EVERY + len(self._open)

    @property
    def num_bytes(self) -> int:
        return self._end

    def add(self, whole: Callable[[], Snapshot], change: Snapshot, blocks: bytes) -> None:
        """Add a moment: the complete state (`whole`), the changes, and a byte for each block. Raises OSError."""
        before = self._blocks if self._open else b""
        state = change if self._open else whole()
        said = ({**state, "blocks": None}, len(blocks), _changes(before, blocks))
        with self._lock:
            self._open.append(_encode(said))
            self._blocks = blocks
            if len(self._open) == EVERY:
                piece = zlib.compress(_encode(self._open), LEVEL)
                self._file.seek(self._end)
                self._file.write(piece)
                self._open = []  # clear it first: the length is read without the lock, and would count them twice
                self._starts.append(self._end)
                self._end += len(piece)

    def at(self, index: int) -> tuple[Snapshot, bytes]:
        """The state at a moment, and its blocks. Raises IndexError, OSError."""
        number, place = divmod(index, EVERY)
        with self._lock:
            if not 0 <= index < len(self):
                raise IndexError(index)
            piece = self._open if number == len(self._starts) else self._piece(number)
            piece = piece[: place + 1]
        state: Snapshot = {"requests": {}}
        blocks = bytearray()
        for said in piece:
            change, size, parts = _decode(said)
            state = _merged(state, change)
            del blocks[size:]
            for first, part in parts:
                blocks[first : first + len(part)] = part
        return state, bytes(blocks)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _piece(self, number: int) -> list[bytes]:
        if self._read[0] != number:
            ends = [*self._starts[number + 1 : number + 2], self._end]
            self._file.seek(self._starts[number])
            self._read = number, _pieces(zlib.decompress(self._file.read(ends[0] - self._starts[number])))
        return self._read[1]


def _changes(before: bytes, now: bytes) -> list[tuple[int, bytes]]:
    """The slices of `now` that differ from `before`, with their offsets."""
    if before == now:
        return []
    starts = range(0, len(now), SLICE)
    slices = ((start, now[start : start + SLICE]) for start in starts)
    return [(start, part) for start, part in slices if before[start : start + SLICE] != part]


def _merged(state: Snapshot, change: Snapshot) -> Snapshot:
    requests = state["requests"]
    for key, fields in change["requests"].items():
        if fields is None:
            requests.pop(key, None)
        else:
            requests.setdefault(key, {}).update(fields)
    return {**change, "requests": requests}
