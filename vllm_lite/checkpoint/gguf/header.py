"""Reader of a GGUF file's header: metadata, and the positions of tensors. https://github.com/ggml-org/ggml has the
format.

A header is untrusted: every count and length is checked against the file's size before anything is allocated. Arrays
are skipped and read on demand: a vocabulary is most of a header, and an engine needs none of it.
"""

import math
import mmap
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_lite.checkpoint.gguf.changes import Change, changed
from vllm_lite.checkpoint.gguf.kinds import KINDS, Kind
from vllm_lite.errors import ModelError
from vllm_lite.runtime.untrusted_files import LFS_POINTER, is_lfs_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_VALUES = 1 << 14
MAX_TENSORS = 1 << 15
MAX_NAME_BYTES = 1 << 10
MAX_TEXT_BYTES = 1 << 24
"""Maximum bytes of all names and single strings; a chat template has some thousand."""
MAX_TEXTS = 1 << 21
"""Maximum number of strings in all arrays: vocabularies have up to 300,000 tokens and as many merges."""
MAX_DIMENSIONS = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types -> format letters of `struct`, and of the array module except "?"."""


class Array:
    """An array of the metadata, whose values are read from the file on demand."""

    def __init__(self, file: "_File", kind: int, count: int, start: int) -> None:
        self._file, self._kind, self._count, self._start = file, kind, count, start

    def __len__(self) -> int:
        return self._count

    @property
    def is_text(self) -> bool:
        return self._kind == _TEXT

    def numbers(self) -> "array[int] | array[float]":
        """Return all values. Raises ModelError if they are strings."""
        if self.is_text:
            raise self._file.error("an array of strings is where numbers are expected")
        letter = _NUMBERS[self._kind].replace("?", "B")
        return array(letter, self._file.data[self._start : self._start + self._count * struct.calcsize(letter)])

    def texts(self) -> list[str]:
        """Return all values. Raises ModelError if they are numbers, or not UTF-8."""
        if not self.is_text:
            raise self._file.error("an array of numbers is where strings are expected")
        data, at, found = self._file.data, self._start, []
        try:
            for _ in range(self._count):
                (size,) = _U64.unpack_from(data, at)
                found.append(str(data[at + 8 : at + 8 + size], "utf-8"))
                at += 8 + size
        except UnicodeDecodeError as error:
            raise self._file.error(f"a string of an array is not UTF-8 ({error})") from error
        return found


Value = int | float | bool | str | Array


class GgufTensor(NamedTuple):
    """A tensor's type, shape and position."""

    kind: Kind
    shape: tuple[int, ...]
    """Shape in torch's order, rows first; the file has the reverse order."""
    file: Path
    offset: int
    """Position of its first byte in the file."""
    changes: tuple[Change, ...] = ()
    """Changes that derive the checkpoint's tensor; `shape` is the file's."""

    @property
    def restored_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return changed(self.shape, self.changes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.kind.elements * self.kind.num_bytes


class GgufHeader(NamedTuple):
    """A file's header: metadata and tensors."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises ModelError for one that is damaged or not GGUF."""
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise ModelError(f"{path}: is not a file; a GGUF file is expected")
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read as GGUF ({error})") from error
    return _Reader(path, data).header()


def read_metadata(path: Path) -> Mapping[str, Value]:
    """Read only the metadata. Raises ModelError."""
    return read_header(path).metadata


class _File:
    """A memory-mapped file, kept open by its arrays."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}; it is damaged, or no GGUF file")


class _Reader(_File):
    """Parses a header sequentially."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        super().__init__(path, data)
        self.at, self.num_texts, self.text_bytes = 0, 0, 0

    def header(self) -> GgufHeader:
        if is_lfs_pointer(self.data[:64]):
            raise ModelError(f"{self.path}: {LFS_POINTER}")
        if self.data[:4] != MAGIC:
            raise self.error(f"it begins with {self.data[:4]!r}, not {MAGIC!r}")
        self.at = 4
        version = self.u32()
        if version not in VERSIONS:
            big = " of big-endian machines" if version.to_bytes(4, "little")[3] in VERSIONS else ""
            raise ModelError(f"{self.path}: is of version {version}{big}; supported: 2 and 3, little-endian")
        num_tensors = self.counted(self.u64(), "tensors", MAX_TENSORS, least_bytes=24)
        num_values = self.counted(self.u64(), "values", MAX_VALUES, least_bytes=13)
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            name = self.name()
            if name in metadata:
                raise self.error(f"it has two values {name!r}")
            metadata[name] = self.value(name, self.u32())
        return GgufHeader(metadata, self.tensors(num_tensors, self.alignment(metadata)))

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Parse the tensor infos, whose offsets count from the first aligned byte after the last of them."""
        infos: dict[str, tuple[Kind, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self.name()
            if name in infos:
                raise self.error(f"it has two tensors {name!r}")
            infos[name] = self.info(name, alignment)
        start = self.at + -self.at % alignment
        found = {name: GgufTensor(kind, shape, self.path, start + at) for name, (kind, shape, at) in infos.items()}
        self.check_places(found)
        return found

    def info(self, name: str, alignment: int) -> tuple[Kind, tuple[int, ...], int]:
        num_dimensions = self.u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.error(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([self.u64() for _ in range(num_dimensions)]))
        number, offset = self.u32(), self.u64()
        kind = KINDS.get(number)
        if kind is None:
            raise ModelError(f"{self.path}: tensor {name!r} has a type {number} that is not known")
        if 0 in shape or shape[-1] % kind.elements or math.prod(shape) >= 1 << 62:
            raise self.error(f"tensor {name!r} of type {kind.name} has the shape {list(shape)}")
        if offset % alignment:
            raise self.error(f"tensor {name!r} begins at {offset}, which is not a multiple of {alignment}")
        return kind, shape, offset

    def check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        """Raise ModelError unless all tensors are within the file and do not overlap."""
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self.error(f"tensors {before!r} and {name!r} overlap")
            end, before = tensor.offset + tensor.num_bytes, name
            if end > len(self.data):
                raise ModelError(
                    f"{self.path}: tensor {name!r} ends at byte {end} and the file at {len(self.data)}; it is truncated"
                )

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(found, int) or not 8 <= found <= MAX_ALIGNMENT or found % 8:
            raise self.error(f"general.alignment {found!r} is not a multiple of 8 up to {MAX_ALIGNMENT}")
        return found

    def value(self, name: str, kind: int) -> Value:
        if kind == _TEXT:
            return self.text(MAX_TEXT_BYTES, name)
        if kind == _ARRAY:
            return self.array(name)
        return self.number(name, kind)

    def number(self, name: str, kind: int) -> int | float | bool:
        letter = _NUMBERS.get(kind)
        if letter is None:
            raise self.error(f"value {name!r} has a type {kind} that is not known")
        found: int | float | bool
        (found,) = struct.unpack(f"<{letter}", self.taken(struct.calcsize(f"<{letter}")))
        return found

    def array(self, name: str) -> Array:
        """Skip an array. Raises ModelError for an array of arrays, of which a few bytes could encode many."""
        kind, count = self.u32(), self.u64()
        if kind != _TEXT and kind not in _NUMBERS:
            raise self.error(f"the array {name!r} has values of a type {kind}, which is neither a number nor a string")
        size = 8 if kind == _TEXT else struct.calcsize(f"<{_NUMBERS[kind]}")
        if count > (len(self.data) - self.at) // size:
            raise self.error(f"the array {name!r} has {count} values and the file ends before them")
        found = Array(self, kind, count, self.at)
        if kind == _TEXT:
            self.pass_texts(count, name)
        else:
            self.at += count * size
        return found

    def pass_texts(self, count: int, name: str) -> None:
        """Skip the strings of an array. This loop over a vocabulary takes most of the time of a header."""
        self.num_texts += count
        if self.num_texts > MAX_TEXTS:
            raise self.error(f"with the array {name!r} it has {self.num_texts} strings; at most {MAX_TEXTS} are read")
        data, at, end, unpack = self.data, self.at, len(self.data) - 8, _U64.unpack_from
        for _ in range(count):
            if at > end:
                at = len(data) + 1
                break
            at += 8 + unpack(data, at)[0]
        if at > len(data):
            raise self.error(f"the array {name[:80]!r} ends beyond the file")
        self.at = at

    def counted(self, count: int, what: str, most: int, least_bytes: int) -> int:
        """Check a number of entries of at least `least_bytes` each."""
        if count > most or count * least_bytes > len(self.data):
            raise self.error(f"it says that it has {count} {what}")
        return count

    def name(self) -> str:
        return self.text(MAX_NAME_BYTES, "a name")

    def text(self, most: int, name: str) -> str:
        size = self.u64()
        self.text_bytes += size
        if size > most or self.text_bytes > MAX_TEXT_BYTES:
            raise self.error(f"{name[:80]!r} has {size} bytes, and its strings {self.text_bytes} up to there")
        try:
            return self.taken(size).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{name[:80]!r} is not UTF-8 ({error})") from error

    def u32(self) -> int:
        return int(_U32.unpack(self.taken(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.taken(8))[0])

    def taken(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > len(self.data) - self.at:
            raise self.error(f"its header ends beyond the file, at byte {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]
