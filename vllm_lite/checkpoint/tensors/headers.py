"""The safetensors files of a checkpoint folder, and their headers. No torch."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.errors import ModelError
from vllm_lite.runtime.untrusted_files import LFS_POINTER, is_lfs_pointer, read_bounded

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NO_WEIGHTS = ("consolidated", "adapter_", "optimizer", ".")
"""Prefixes of safetensors files without weights of the model, or with the same ones under another program's names."""
_SHARD = re.compile(r"(.+)-(\d{3,6})-of-(\d{3,6})\.safetensors")
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, by the format."""
FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=8)]
"""Bounded, as an untrusted header could have a shape of 200,000 large numbers, whose product takes seconds."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor's description in a header."""

    dtype: str
    """The format's name: "BF16", "F32", ..."""
    shape: Shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class _Located(Tensor, frozen=True):
    data_offsets: tuple[int, int]
    """First byte and end, relative to the end of the header."""


class TensorPlace(NamedTuple):
    """A tensor's file, position, type and shape."""

    file: Path
    offset: int
    """Offset of its first byte in the file; its end has been checked to be within the file."""
    dtype: str
    shape: tuple[int, ...]
    identity: tuple[int, ...]
    """The file's identity() before its header was read."""

    @property
    def num_bytes(self) -> int:
        return FLOAT_BYTES[self.dtype] * math.prod(self.shape)

    def read(self) -> bytearray:
        """Read its bytes. Raises OSError, also if the file has become shorter."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            data = bytearray(self.num_bytes)
            if stream.readinto(data) < len(data):
                raise OSError(f"{self.file} has become shorter")
        return data


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """Find the safetensors files of a checkpoint folder: a single file, the shards of its index, or without either all
    files, if no tensor is in two of them.

    Raises ModelError if there are none, or if the index is damaged or names a file outside the folder.
    """
    if (folder / SINGLE_FILE).exists():
        if not (folder / SINGLE_FILE).is_file():  # opening a pipe would block
            raise ModelError(f"{folder / SINGLE_FILE}: is not a file; a safetensors file is expected")
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.exists() and (named := unindexed(file.name for file in folder.glob("*.safetensors"))):
        return _apart([folder / name for name in named])
    if not index.exists():
        others = sorted(file.name for file in folder.glob("*") if file.suffix in (".bin", ".pt", ".pth"))
        hint = f"; {', '.join(others[:3])} cannot be used, as only safetensors and GGUF are read" if others else ""
        raise ModelError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    files = [folder / name for name in shards(index)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{index}: names the file {file.name!r}, which is missing")
    return files


def unindexed(names: Iterable[str]) -> list[str]:
    """Choose the weight files among the names of a folder without an index, sorted. Raises ModelError for an incomplete
    series of numbered files."""
    found = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith(NO_WEIGHTS))
    for series, total in {(match[1], match[3]) for name in found if (match := _SHARD.fullmatch(name))}:
        held = {int(match[2]) for name in found if (match := _SHARD.fullmatch(name)) and match[1] == series}
        if len(held) < int(total):
            first = next(number for number in range(1, int(total) + 1) if number not in held)
            raise ModelError(
                f"{series}-{first:0{len(total)}}-of-{total}.safetensors is missing, one of {int(total)} files"
            )
    return found


def _apart(files: list[Path]) -> list[Path]:
    """Return `files`, after checking that no two have the same tensor, of which neither could be preferred."""
    holders: dict[str, Path] = {}
    for file in files:
        for name in _header(file, Tensor)[0]:
            if (other := holders.setdefault(name, file)) is not file:
                raise ModelError(
                    f"{file.parent}: {other.name} and {file.name} both hold {shown(name)}, and no {INDEX_FILE} says "
                    "which is meant; remove one of them"
                )
    return files


def shards(index: Path) -> list[str]:
    """Read the sorted names of an index's files. Raises ModelError if it is damaged or names a file elsewhere."""
    try:
        weight_map = msgspec.json.decode(read_bounded(index, MAX_HEADER_BYTES), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error})") from error
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: names the file {name!r}; it must be a .safetensors file in the same folder")
    return names


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Read the headers of the checkpoint in `folder`: every tensor by name, without weights. Raises ModelError.

    Tensors of GGUF files have canonical names, and their GGUF type, like "Q4_K", unless they are floats.
    """
    if (gguf := GgufCheckpoint.find(folder)) is not None:
        return {name: Tensor(found.kind.name, found.restored_shape) for name, found in gguf.tensors().items()}
    return {name: tensor for file in weight_files(folder) for name, tensor in _header(file, Tensor)[0].items()}


def locate(folder: Path) -> dict[str, TensorPlace]:
    """Positions of the float tensors of the checkpoint in `folder`, by name; other types are left out. Raises
    ModelError for a tensor outside of its file."""
    return {name: place for file in weight_files(folder) for name, place in locate_in(file).items()}


def locate_in(file: Path) -> dict[str, TensorPlace]:
    """Positions of the float tensors in one safetensors file. Raises ModelError."""
    found = {}
    stat = file.stat()
    tensors, start = _header(file, _Located)
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_BYTES:
            continue
        begin, end = tensor.data_offsets
        num_bytes = FLOAT_BYTES[tensor.dtype] * tensor.num_elements
        if begin < 0 or end - begin != num_bytes or start + end > stat.st_size:
            raise ModelError(f"{file}: tensor {shown(name)} is not within the file; it is truncated or damaged")
        found[name] = TensorPlace(file, start + begin, tensor.dtype, tensor.shape, identity(stat))
    return found


def shown(name: str) -> str:
    """Format an untrusted tensor name for an error."""
    return name if name.isprintable() and len(name) < 200 else ascii(name[:200])


def read_file_header(file: Path) -> dict[str, Tensor]:
    """Read the header of one safetensors file. Raises ModelError."""
    return _header(file, Tensor)[0]


def identity(stat: os.stat_result) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


T = TypeVar("T", bound=Tensor)


def _header(file: Path, kind: type[T]) -> tuple[dict[str, T], int]:
    """Read the tensors, and the position of the header's end."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if length > min(size - 8, MAX_HEADER_BYTES):
                stream.seek(0)
                if is_lfs_pointer(stream.read(64)):
                    raise ModelError(f"{file}: {LFS_POINTER}")
                raise ModelError(
                    f"{file}: its header needs {length} bytes and the file has {size}; it is truncated or no such file"
                )
            entries = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=kind) for name, entry in entries.items()}, 8 + length
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file}: not a valid safetensors file: {error}") from error
