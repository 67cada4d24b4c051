"""Packed weights in one file, each under a name: written once, and read by threads into huge pages. No torch.

    page 0      magic, length and checksum of the list, zeros
    then        the weights as they lie in memory, side by side, with a checksum for each part of PART_BYTES
    at the end  the list of them (msgpack), as a file is written while its weights are being packed

They are read, not mapped. That takes 0.1 s a gigabyte, part of which its check takes in any case; a mapped file that is
cut ends its process by a signal, and on file systems with small pages in memory a step reads them more slowly. A file
appears by rename or not at all, and what does not have its checksum is never used.
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
"""First bytes of a file; the last of them is the version of this module."""
PAGE = 4096
PART_BYTES = 8 << 20
"""Read and written at a time. After each a thread asks for the interpreter, which one that imports gives every 5 ms."""
MAX_LIST_BYTES = 100_000_000
_ALIGNMENT_BYTES = 64
_START = struct.Struct("<8sIQ")
_CHECKSUM_BYTES = 8

Count = Annotated[int, Meta(ge=0, le=1 << 48)]


class Unfit(ValueError):
    """A file that is not what it was opened for: of another key, or cut or damaged."""


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A weight, and the position of its bytes behind the first page."""

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
        """The bytes of all weights."""
        return max((entry.end for entry in self.entries), default=0)


class PackedFile:
    """Begins to read the weights of a file, in their order, when it is made. To be closed; what was taken stays."""

    def __init__(self, path: Path, key: bytes, num_threads: int = 2) -> None:
        """Raises OSError where the file cannot be read, or there is no memory, and Unfit unless it was written with
        this `key` and nobody else may write it."""
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
        """A weight, once: waits until it is read. `waiting` is called now and then. None if there is none, or if a part
        of it is not as it was written."""
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
        """Whether they are read, or never will be."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_damaged or self._read >= parts, LOOK_EVERY_S)

    def close(self) -> None:
        """End what is not read, and give back what nobody has taken."""
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
        """Whether a part is there as it was written."""
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
    """Writes the weights that it is given to an open file, from its beginning on. Nothing counts before the end."""

    def __init__(self, file: int, key: bytes) -> None:
        self.num_bytes = 0
        """Bytes written after the first page."""
        self._file, self._key = file, key
        self._entries, self._checksums, self._part = list[_Entry](), list[bytes](), xxh3_64()

    def add(self, name: bytes, packed: Packed) -> None:
        """Raises OSError."""
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
        """Write the list, and then the first page, without which the file is none. Raises OSError."""
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
    """Raises Unfit or OSError."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Unfit("it is no file that its user alone may write")
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
    """Whether a weight has the bytes that kernels will read."""
    if entry.dtype not in FLOATS:
        return False
    num_bytes, num_supers = packed_size(entry.num_outputs, entry.num_inputs, entry.dtype, entry.form)
    return (entry.data_bytes, entry.supers_bytes) == (num_bytes, 4 * num_supers)
