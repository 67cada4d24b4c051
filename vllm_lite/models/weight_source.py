"""The tensors of a checkpoint by their canonical names, mapped into memory from safetensors or GGUF files."""

import json
import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from vllm_lite.checkpoint.gguf.changes import Change, HeadOrder, LogOfMinus
from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.checkpoint.gguf.header import GgufTensor
from vllm_lite.checkpoint.tensors.headers import weight_files
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.errors import ModelError
from vllm_lite.kernels.cpu import memory

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(Protocol):
    """One tensor in an open file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """safetensors' name of the type; U8 for quantized blocks."""
        ...

    def mapped(self) -> torch.Tensor:
        """The whole tensor as a view of the mapped file, which is not read yet. Raises ModelError."""
        ...


def open_source(path: Path, stack: ExitStack) -> Mapping[str, Stored]:
    """Open the checkpoint `path`, a folder or a GGUF file; tensors are valid until `stack` is closed. Raises ModelError
    if files are missing or damaged, or two tensors have one name."""
    if (gguf := GgufCheckpoint.find(path)) is not None:
        return _gguf(gguf)
    found: dict[str, _InSafetensors] = {}
    for file in weight_files(path):
        opened = _open(file, stack)
        for stored_as in opened.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
            name = canonical(stored_as)
            if name in found:
                raise ModelError(f"{file}: tensor {stored_as!r} is also in {found[name].file.name}; it must be in one")
            found[name] = _InSafetensors(file, opened, stored_as)
    return found


class _InSafetensors:
    def __init__(self, file: Path, opened: Any, name: str) -> None:
        self.file = file
        self.name = name
        self.slice = opened.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self.slice.get_shape())
        self.dtype: str = self.slice.get_dtype()

    def mapped(self) -> torch.Tensor:
        try:
            whole: torch.Tensor = self.slice[...]
        except SafetensorError as error:
            raise ModelError(f"{self.file}: tensor {self.name!r} cannot be read ({error})") from error
        return whole


class _InGguf:
    def __init__(self, name: str, tensor: GgufTensor, mapping: mmap.mmap) -> None:
        self.name, self.tensor, self.mapping = name, tensor, mapping
        self.dtype = tensor.kind.name if tensor.kind.name in FLOATS else "U8"
        self.shape = self._in_blocks(tensor.restored_shape)

    def _in_blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        kind = self.tensor.kind
        return shape if kind.name in FLOATS else (*shape[:-1], shape[-1] // kind.elements * kind.num_bytes)

    def mapped(self) -> torch.Tensor:
        """The tensor from the mapped file. One that a converter changed is restored in a copy, and the file's pages are
        released."""
        tensor = self.tensor
        row = torch.frombuffer(self.mapping, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)
        stored = row.view(FLOATS.get(self.dtype, torch.uint8)).view(self._in_blocks(tensor.shape))
        try:
            found = restored(stored, tensor.changes)
        except ValueError as error:
            raise ModelError(f"{tensor.file}: tensor {self.name!r} {error}") from error
        if found.data_ptr() != stored.data_ptr():
            memory.give_back(stored)
        return found


def restored(stored: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    """Undo a converter's changes: a view of the stored tensor, or a copy. Raises ValueError, whose text continues the
    tensor's name, if it has other axes or elements than a converter writes."""
    for change in changes:
        if isinstance(change, LogOfMinus):
            if not bool((stored < 0).all()):
                raise ValueError("must have elements below 0 alone, as a state decays by them")
            stored = stored.float().neg().log_()
        elif not isinstance(change, HeadOrder):
            stored = stored.view(change.shape(tuple(stored.shape)))
        elif stored.dim() <= change.axis or stored.shape[change.axis] != change.end:
            raise ValueError(f"is {list(stored.shape)} and must have {change.end} elements along axis {change.axis}")
        else:
            stored = stored.index_select(change.axis, torch.tensor(change.order()))
    return stored


def _gguf(checkpoint: GgufCheckpoint) -> Mapping[str, Stored]:
    """Map a GGUF checkpoint. Mappings stay until the last tensor in them is freed. They are copy-on-write only because
    torch requires writable memory; nothing writes to them."""
    mappings: dict[Path, mmap.mmap] = {}
    found = {}
    for name, tensor in checkpoint.tensors().items():
        if tensor.file not in mappings:
            with tensor.file.open("rb") as stream:
                mappings[tensor.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        mapping = mappings[tensor.file]
        if tensor.offset + tensor.num_bytes > len(mapping):
            raise ModelError(f"{tensor.file}: tensor {name!r} ends beyond the file, which has become shorter")
        found[name] = _InGguf(name, tensor, mapping)
    return found


def _open(file: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a valid safetensors file: {_damage(file) or error}") from error


def _damage(file: Path) -> str | None:
    """Describe the damage of a file that safetensors rejects, if its header suffices to name a tensor."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            if header_size > size - 8:
                return f"its header needs {header_size} bytes and the file has {size}; it is truncated or no such file"
            header = json.loads(stream.read(header_size))
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        name = max(ends, key=ends.__getitem__)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    needed = 8 + header_size + ends[name]
    return f"tensor {name!r} ends at byte {needed} and the file at {size}; it is truncated" if needed > size else None
