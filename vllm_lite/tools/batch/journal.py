"""The journal of a batch: the answered rows, and their bytes of the output.

    header    one line of JSON: digests of the input and of the settings that change answers
    records   32 bytes each, the last four a CRC-32 of the others

A record is appended after the row's line. From time to time the output and then the journal are synced to disk, with a
MARK between them: everything before a mark is on disk. After a process dies, both files have all that was written;
after the machine dies, data after the last mark may be torn, so its lines are compared with their checksums. The first
record that is torn or has no line ends the journal.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from vllm_lite.errors import ConfigError

_FORMAT = struct.Struct("<IIIIIIB3x")
_CHECKSUM = struct.Struct("<I")
RECORD_BYTES = _FORMAT.size + _CHECKSUM.size
RECORDS_AT_ONCE = 4096
MAX_U32 = (1 << 32) - 1
VERSION = 1


class RecordKind(IntEnum):
    """Kinds of records. ANSWERED, FAILED and BAD rows have a line in the output."""

    ANSWERED = 1
    FAILED = 2
    BAD = 3
    MARK = 4
    FINISHED = 5


class BatchRecord(NamedTuple):
    """A record: the row in `line` is answered by `num_bytes` of the output with this CRC-32. In a MARK, `busy_ms` is
    the working time of runs since the previous mark."""

    kind: RecordKind
    line: int = 0
    num_bytes: int = 0
    checksum: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def has_line(self) -> bool:
        return self.kind <= RecordKind.BAD

    @property
    def busy_ms(self) -> int:
        return self.num_bytes if self.kind is RecordKind.MARK else 0

    def pack(self) -> bytes:
        numbers = (min(number, MAX_U32) for number in self[1:])
        data = _FORMAT.pack(*numbers, self.kind)
        return data + _CHECKSUM.pack(crc32(data))


class BatchHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a batch: its input and settings. `replacement` is a file that replaces the output once this
    journal has replaced the old one (BatchResults)."""

    input: str
    settings: dict[str, str] = {}
    replacement: str | None = None
    version: int = VERSION

    def changed(self, now: "BatchHeader") -> list[str]:
        """Names of the input or settings that differ in `now`."""
        names = sorted(self.settings.keys() | now.settings.keys())
        others = [f"--{name.replace('_', '-')}" for name in names if self.settings.get(name) != now.settings.get(name)]
        return ["--input-file"] * (self.input != now.input) + others


class Journal:
    def __init__(self, path: Path) -> None:
        """Raises ConfigError if another run has locked it."""
        self.path = path
        self.start = 0
        self._fd = open_locked(path)

    def header(self) -> BatchHeader | None:
        """The header; None if there is none yet. Raises ConfigError for another kind of file."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            line = file.readline(1 << 20)
        if not line.endswith(b"\n"):
            return None  # its first run died before writing anything
        try:
            found = msgspec.json.decode(line, type=BatchHeader)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{str(self.path)!r} is not a journal of run-batch: {error}") from error
        if found.version != VERSION:
            raise ConfigError(f"{str(self.path)!r} was written by another version of run-batch")
        self.start = len(line)
        return found

    def records(self) -> Iterator[tuple[int, BatchRecord]]:
        """Each record with the offset of its end in the journal, up to the first torn one."""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(self.start)
            end = self.start
            while data := file.read(RECORD_BYTES * RECORDS_AT_ONCE):
                for start in range(0, len(data), RECORD_BYTES):
                    record = _unpack(data[start : start + RECORD_BYTES])
                    if record is None:
                        return
                    end += RECORD_BYTES
                    yield end, record

    def end_of_marked(self) -> int:
        """The offset after the last mark, before which everything is on disk."""
        marks = (end for end, record in self.records() if not record.has_line)
        return max(marks, default=self.start)

    def begin(self, header: BatchHeader) -> None:
        """Start a new journal."""
        os.ftruncate(self._fd, 0)
        data = msgspec.json.encode(header) + b"\n"
        write_whole(self._fd, data)
        self.flush()
        flush_folder(self.path)
        self.start = len(data)

    def append(self, record: BatchRecord) -> None:
        write_whole(self._fd, record.pack())

    def cut(self, end: int) -> None:
        os.ftruncate(self._fd, end)

    def flush(self) -> None:
        os.fsync(self._fd)

    def replace(self, other: "Journal") -> None:
        """Replace this journal's file by that of `other`, atomically, and continue with it."""
        other.flush()
        os.replace(other.path, self.path)
        self._fd, other._fd = other._fd, self._fd  # noqa: SLF001 - of the same class
        self.start = other.start
        other.close()
        flush_folder(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unpack(data: bytes) -> BatchRecord | None:
    if len(data) < RECORD_BYTES or _CHECKSUM.unpack(data[_FORMAT.size :])[0] != crc32(data[: _FORMAT.size]):
        return None
    *numbers, kind = _FORMAT.unpack(data[: _FORMAT.size])
    return BatchRecord(RecordKind(kind), *numbers)


def open_locked(path: Path) -> int:
    """Open and lock `path` for appending. Raises ConfigError if another run has locked it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd  # else another run has replaced the file meanwhile
        except BlockingIOError as error:
            os.close(fd)
            raise ConfigError(f"another run-batch is writing {str(path)!r}; wait for it, or choose another") from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def write_whole(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def flush_folder(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
