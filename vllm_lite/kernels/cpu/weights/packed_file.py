"""A file of packed weights with names: written once, and read by threads into huge pages. Does not import torch.

    page 0      magic, length and checksum of the list, zeros
    then        the bytes of the weights in order; each part of PART_BYTES has a checksum in the list at the end  the
    list of weights (msgpack): it is last because the file is written while weights are being packed

Weights are read, not mapped. Reading takes 0.1 s per gigabyte, part of which checking takes in any case. Truncating a
mapped file would kill the process by a signal, and steps read a mapped file more slowly on file systems whose page
cache has small pages. A file appears by rename or not at all, and a part with a wrong checksum is never used.
"""

import os
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from xxhash import xxh3_64, xxh3_64_intdigest

from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.kernels.cpu.pages import Pages
from vllm_lite.kernels.cpu.weights.file_packer import FLOATS, LOOK_EVERY_S, Packed, packed_size

MAGIC = b"vllpw\x00\x00\x01"
"""First bytes of a file. The last byte is the version of the format."""
PAGE = 4096
PART_BYTES = 8 << 20
"""Bytes read at a time, and bytes per checksum. After each part a thread needs the interpreter's lock, which a thread
that imports releases every 5 ms."""
MAX_LIST_BYTES = 100_000_000
_ALIGNMENT_BYTES = 64
_START = struct.Struct("<8sIQ")
_CHECKSUM_BYTES = 8

Count = Annotated[int, Meta(ge=0, le=1 << 48)]


class Unfit(ValueError):
    """The file cannot be used: it has another key, or is truncated or damaged."""


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A weight, and the offsets of its bytes after the first page."""

    name: Annotated[bytes, Meta(max_length=64)]
    num_outputs: Count
    num_inputs: Count
    dtype: str
    form: Form | None
    data: Count
    data_bytes: Count
    supers: Count
    supers_bytes: Count

    @property
    def end(self) -> int:
        return self.supers + self.supers_bytes


class _List(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: Annotated[bytes, Meta(max_length=64)]
    entries: list[_Entry]
    checksums: bytes
    """The checksums of the parts, in order, without separators."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, padding included."""
        return max((entry.end for entry in self.entries), default=0)


class PackedFile:
    """Reads the weights of a file in order, from its creation on. It must be closed; weights that were taken stay
    valid."""

    def __init__(self, path: Path, key: bytes, num_threads: int = 2) -> None:
        """Raises OSError if the file cannot be read or memory is exhausted. Raises Unfit unless the file was written
        with this `key`, is undamaged, and only its owner, this user, may write it."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._list = _read_list(self._file, key)
            with suppress(OSError):  # on a disk that can only be read
                os.utime(self._file)
            self.num_bytes = self._list.num_bytes
            self._num_parts = _num_parts(self.num_bytes)
            self._pages = Pages.zeros(self.num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._entries = {entry.name: entry for entry in self._list.entries}
        self._changed = threading.Condition()
        self._next, self._read = 0, set[int]()
        self.is_damaged = self.is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"packed weights {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def names(self) -> set[bytes]:
        """The weights that nobody has taken."""
        return set(self._entries)

    def take(self, name: bytes, waiting: Callable[[], object] = lambda: None) -> Packed | None:
        """Take a weight; waits until it is read. A weight can be taken once. `waiting` is called every LOOK_EVERY_S
        seconds. Returns None if there is no such weight, or if the file is damaged."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        parts = set(range(entry.data // PART_BYTES, -(-entry.end // PART_BYTES)))
        while not self._await(parts):
            waiting()
        if self.is_damaged:
            return None
        del self._entries[name]
        view, first = memoryview(self._pages.mapping), self._pages.start
        data = view[first + entry.data : first + entry.data + entry.data_bytes]
        supers = view[first + entry.supers : first + entry.end] if entry.supers_bytes else None
        return Packed(entry.num_outputs, entry.num_inputs, entry.dtype, data, supers, entry.form)

    def _await(self, parts: set[int]) -> bool:
        """Wait up to LOOK_EVERY_S seconds. Returns whether the parts are read or the file is damaged."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_damaged or self._read >= parts, LOOK_EVERY_S)

    def close(self) -> None:
        """Stop reading, and free the weights that nobody has taken."""
        if self.is_closed:
            return
        self.is_closed = True
        for thread in self._threads:
            thread.join()
        os.close(self._file)
        for entry in self._entries.values():
            self._pages.give_back(entry.data, entry.end - entry.data)
        self._entries.clear()

    def _serve(self) -> None:
        while not (self.is_closed or self.is_damaged):
            with self._changed:
                part, self._next = self._next, self._next + 1
            if part >= self._num_parts:
                return
            is_whole = self._read_part(part)
            with self._changed:
                self._read.add(part)
                self.is_damaged |= not is_whole
                self._changed.notify_all()
            if not is_whole:
                return

    def _read_part(self, part: int) -> bool:
        """Read a part. Returns whether it is complete and has its checksum."""
        first, end = part * PART_BYTES, min((part + 1) * PART_BYTES, self.num_bytes)
        room = memoryview(self._pages.mapping)[self._pages.start + first : self._pages.start + end]
        done = 0
        with suppress(OSError):
            while done < len(room):
                count = os.preadv(self._file, [room[done:]], PAGE + first + done)
                if count == 0:
                    return False
                done += count
            at = part * _CHECKSUM_BYTES
            written = self._list.checksums[at : at + _CHECKSUM_BYTES]
            return xxh3_64_intdigest(room) == int.from_bytes(written, "little")
        return False


class PackedWriter:
    """Writes weights to an open file. The file is invalid until `end` has written the first page."""

    def __init__(self, file: int, key: bytes) -> None:
        self.num_bytes = 0
        """Bytes written after the first page."""
        self._file, self._key = file, key
        self._entries, self._checksums, self._part = list[_Entry](), list[bytes](), xxh3_64()

    def add(self, name: bytes, packed: Packed) -> None:
        """Write a weight. Raises OSError."""
        data = self._align()
        self._put(packed.data)
        supers = self.num_bytes
        if packed.supers is not None:
            supers = self._align()
            self._put(packed.supers)
        sizes = (packed.num_outputs, packed.num_inputs, packed.dtype, packed.form)
        places = (data, packed.data.nbytes, supers, self.num_bytes - supers)
        self._entries.append(_Entry(name, *sizes, *places))

    def end(self) -> None:
        """Write the list and then the first page, which makes the file valid. Raises OSError."""
        if self.num_bytes % PART_BYTES:
            self._end_part()
        body = msgspec.msgpack.encode(_List(self._key, self._entries, b"".join(self._checksums)))
        _write_all(self._file, memoryview(body), PAGE + self.num_bytes)
        page = _START.pack(MAGIC, len(body), xxh3_64_intdigest(body)).ljust(PAGE, b"\0")
        _write_all(self._file, memoryview(page), 0)

    def _align(self) -> int:
        self._put(memoryview(bytes(-self.num_bytes % _ALIGNMENT_BYTES)))
        return self.num_bytes

    def _put(self, view: memoryview) -> None:
        while view.nbytes:
            piece = view[: PART_BYTES - self.num_bytes % PART_BYTES]
            _write_all(self._file, piece, PAGE + self.num_bytes)
            self._part.update(piece)
            self.num_bytes += piece.nbytes
            if self.num_bytes % PART_BYTES == 0:
                self._end_part()
            view = view[piece.nbytes :]

    def _end_part(self) -> None:
        self._checksums.append(self._part.intdigest().to_bytes(_CHECKSUM_BYTES, "little"))
        self._part.reset()


def _write_all(file: int, view: memoryview, at: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(file, view[done:], at + done)


def _num_parts(num_bytes: int) -> int:
    return -(-num_bytes // PART_BYTES)


def _read_list(file: int, key: bytes) -> _List:
    """Read and check the list. Raises Unfit or OSError."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Unfit("it is not a file that its user alone may write")
    start = os.pread(file, _START.size, 0)
    if len(start) < _START.size:
        raise Unfit(f"it has {len(start)} bytes, less than its first page")
    magic, length, found = _START.unpack(start)
    if magic != MAGIC:
        raise Unfit("it holds no packed weights of this version")
    end = status.st_size - length
    body = os.pread(file, length, end) if length <= MAX_LIST_BYTES and end >= PAGE else b""
    if len(body) != length or xxh3_64_intdigest(body) != found:
        raise Unfit("its list is not the one that was written")
    try:
        listed = msgspec.msgpack.decode(body, type=_List)
    except msgspec.MsgspecError as error:
        raise Unfit(f"its list cannot be read: {error}") from error
    if listed.key != key:
        raise Unfit("it is of other weights, or of another program or processor")
    num_bytes = listed.num_bytes
    if end != PAGE + num_bytes or len(listed.checksums) != _num_parts(num_bytes) * _CHECKSUM_BYTES:
        raise Unfit(f"it has {status.st_size} bytes, expected {PAGE + num_bytes + length}")
    if not all(map(_is_sound, listed.entries)):
        raise Unfit("its weights have other sizes than kernels expect")
    return listed


def _is_sound(entry: _Entry) -> bool:
    """Whether a weight has as many bytes as kernels will read."""
    if entry.dtype not in FLOATS:
        return False
    num_bytes, num_supers = packed_size(entry.num_outputs, entry.num_inputs, entry.dtype, entry.form)
    return (entry.data_bytes, entry.supers_bytes) == (num_bytes, 4 * num_supers)
