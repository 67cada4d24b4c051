"""Loads a model's weights from a checkpoint folder, which must have exactly the tensors that the model needs.

The model lists the tensors that a checkpoint must have, in groups that layers take together (`weight_groups`). All
headers are checked against the list before the first byte is copied, so that one error lists all problems. Then each
group is passed from the mapped files to its layer, which packs it, so that a dense model is never in memory.
"""

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.cpu import memory
from vllm_lite.kernels.cpu.weights.file_packer import Packed
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack
from vllm_lite.models.registry import Model
from vllm_lite.models.weight_cache import PackedSource
from vllm_lite.models.weight_source import Stored, open_source
from vllm_lite.runtime import torch_import

STORED_AS = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
}
"""safetensors' names of types that are not converted; all others are floats, which are."""
STORED_DTYPES = ("F32", "BF16", "F16")
MAX_LISTED = 10
"""Maximum number of names of each kind in an error."""

Progress = Callable[[int, int], None]
"""Callback progress(bytes loaded, total bytes), called after each tensor."""
Read = Callable[[WeightSlot], torch.Tensor]
"""Reads a slot's box, in any dtype, valid until the next call. On the CPU, except random weights of a GPU."""


def load_weights(
    model: Model,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    ahead: PackedSource | None = None,
) -> None:
    """Fill every weight of `model` from the checkpoint folder `path`, converting to the model's dtype.

    `load_format` is "auto", "safetensors" or "gguf", or "dummy" for random weights by `seed`, without reading `path`.
    Without a `progress` callback a bar is shown if stderr is a terminal. `ahead`: packed weights of the same files,
    used if available.
    Raises ModelError if files are missing or damaged, or have other tensors than the model; ConfigError for an unknown
    load format, and for random weights of a quantized checkpoint.
    """
    groups = list(model.weight_groups())
    with ExitStack() as stack:
        if load_format == "dummy":
            _check_dense(model.spec)
            devices = [part.device for group in groups for part in group.stacks]
            read: Read = partial(_random, seed, device=next((d for d in devices if d.type != "cpu"), None))
        elif load_format in ("auto", "safetensors", "gguf"):
            read = Files(groups, model.ignores, Path(path), stack).read
        else:
            raise ConfigError(f"load_format {load_format!r} is not supported; use auto, safetensors, gguf, dummy")
        groups = [group for group in groups if any(slot.num_elements for slot in group.slots)]  # skip other ranks'
        packed = {part.packing_key for group in groups for part in group.stacks if part.packed_as is not None}
        if ahead is not None and not ahead.serves(packed):
            ahead = None
        report, staging = _Report(groups, progress, stack), _Staging()
        for group in groups:
            loaded: dict[int, torch.Tensor | Packed] = {}
            for index, part in sorted(enumerate(group.stacks), key=lambda part: part[1].lent):
                taken = None
                if ahead is not None and part.packed_as is not None:
                    taken = ahead.take(part.packing_key, report.say)
                # A lent tensor is read last, as it is valid only until the next read.
                loaded[index] = _load(part, read, staging) if taken is None else taken
            group.take(*(loaded[index] for index in range(len(loaded))))
            del loaded
            report.has_taken(group)


def check_weights(model: Model, path: str | Path) -> None:
    """Raise ModelError, as `load_weights` does, unless the checkpoint `path` has the tensors of `model`. Reads headers
    only."""
    with ExitStack() as stack:
        Files(list(model.weight_groups()), model.ignores, Path(path), stack)


class _Report:
    """Reports to `progress`, or shows a bar if there is none and stderr is a terminal."""

    def __init__(self, groups: Sequence[WeightGroup], progress: Progress | None, stack: ExitStack) -> None:
        self._done, self._total = 0, sum(num_bytes for group in groups for num_bytes in _sizes(group))
        self._progress = progress
        shows = progress is None and sys.stderr.isatty()
        bar = tqdm(
            desc="loading weights", total=self._total, unit="B", unit_scale=True, file=sys.stderr, disable=not shows
        )
        self._bar = stack.enter_context(bar)

    def has_taken(self, group: WeightGroup) -> None:
        for num_bytes in _sizes(group):
            self._done += num_bytes
            self._bar.update(num_bytes)
            self.say()

    def say(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)


def _sizes(group: WeightGroup) -> Iterator[int]:
    """Bytes of each tensor in the layer's type."""
    return (slot.num_elements * part.dtype.itemsize for part in group.stacks for slot in part.slots)


def _load(part: WeightStack, read: Read, staging: "_Staging") -> torch.Tensor:
    """Load the tensor of a stack: lent, in the mapped file or in `staging`, or in memory that the layer keeps."""
    if part.lent and len(part.slots) == 1:
        tensor = read(part.slots[0])
        if tensor.dtype == part.dtype and tensor.is_contiguous() and tensor.is_cpu:
            return tensor
        return staging.empty(part.shape, part.dtype).copy_(tensor)
    stacked = staging.empty(part.shape, part.dtype) if part.lent else part.empty()
    if not part.shape:
        return stacked.copy_(read(part.slots[0]))
    start = 0
    for slot in part.slots:
        stacked.narrow(part.dim, start, slot.size[part.dim]).copy_(read(slot))
        start += slot.size[part.dim]
    return stacked


class Files:
    """The tensors of a checkpoint, mapped into memory until `stack` is closed. All names and shapes are checked first.

    Raises ModelError if files are missing or damaged, or have other tensors than `groups`.
    """

    def __init__(
        self, groups: Sequence[WeightGroup], ignores: Callable[[str], bool], folder: Path, stack: ExitStack
    ) -> None:
        self._stored = open_source(folder, stack)
        self._last: torch.Tensor | None = None
        table = {slot.name: (slot, part) for group in groups for part in group.stacks for slot in part.slots}
        _check(table, self._stored, ignores, folder)

    def read(self, slot: WeightSlot) -> torch.Tensor:
        """See Read. The memory that the tensor before has taken is given back, so that it never adds up: of all of it,
        as the system maps pages around those of the box."""
        if self._last is not None:
            memory.give_back(self._last)
        self._last = self._stored[slot.name].mapped()
        return slot.cut(self._last)


class _Staging:
    """Memory that is reused for each weight, as allocating pages is slower than filling them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the CPU, valid until the next call."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            self._bytes = self._bytes.new_empty(0)  # free the old memory first
            self._bytes = memory.zeros(num_bytes, torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(shape)


def _check(
    table: dict[str, tuple[WeightSlot, WeightStack]],
    found: Mapping[str, Stored],
    ignores: Callable[[str], bool],
    folder: Path,
) -> None:
    """Raise one ModelError that lists missing and unexpected tensors, wrong shapes and unreadable dtypes."""
    both = [(name, slot, part, found[name]) for name, (slot, part) in table.items() if name in found]
    shapes = [
        f"{name} {stored.shape}, not {slot.stored_shape}"
        for name, slot, _, stored in both
        if not slot.fits(stored.shape)
    ]
    unreadable: dict[tuple[str, ...], list[str]] = {}
    for name, _, part, stored in both:
        readable: tuple[str, ...] = (STORED_AS[part.dtype],) if part.dtype in STORED_AS else STORED_DTYPES
        if (stored_as := stored.dtype) not in readable:
            unreadable.setdefault(readable, []).append(f"{name} {stored_as}")
    problems = [
        *_listing("missing", [name for name in table if name not in found]),
        *_listing("unexpected", [name for name in found if name not in table and not _is_spare(name, found, ignores)]),
        *_listing("of another shape", shapes),
    ]
    for kinds, names in unreadable.items():
        problems += _listing(f"not stored as one of {', '.join(kinds)}", names)
    if problems:
        raise ModelError(f"{folder}: its tensors are not those that its config.json asks for. {'. '.join(problems)}")


def _is_spare(name: str, found: Mapping[str, Stored], ignores: Callable[[str], bool]) -> bool:
    """Whether the tensor is not needed: the model `ignores` it, or it is a bias of zeros, which old GPTQ tools wrote
    for every layer without a bias."""
    if ignores(name):
        return True
    layer, _, part = name.rpartition(".")
    if part != "bias" or f"{layer}.qweight" not in found or len(found[name].shape) != 1:
        return False
    return not bool(found[name].mapped().any())


def _listing(what: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        shown = (name if name.isprintable() else ascii(name) for name in names[:MAX_LISTED])  # names are untrusted
        yield f"{len(names)} {what}: {', '.join(shown)}{more}"


def _check_dense(spec: ModelSpec) -> None:
    """Raise ConfigError for quantized weights: random codes would not fit their scales, groups and tables."""
    found = spec.quantization
    if found is None or (isinstance(found, Gguf) and not found.kinds):
        return
    raise ConfigError(
        f"--load-format dummy is for dense checkpoints, and this one is {found.label}; take a dense one with "
        "--quantization int4, int8 or fp8"
    )


def _random(seed: int, slot: WeightSlot, device: torch.device | None = None) -> torch.Tensor:
    """Make a random tensor: matrices from N(0, 1 / fan_in), norms 1, biases 0. It depends on `seed`, its name and the
    kind of `device` that draws it (None: the CPU, where 8 billion elements take minutes).

    The whole tensor is drawn in float32 and then cut, so that all ranks and dtypes have the same model.
    """
    if len(slot.shape) == 1:
        return torch.full(slot.size, 0.0 if slot.name.endswith("bias") else 1.0)
    torch_import.complete()  # required by Generator
    name = slot.name if slot.stacked is None else f"{slot.name}.{slot.stacked[0]}"
    alone = slot._replace(stacked=None)  # draw only this matrix of a stack
    generator = torch.Generator(device or "cpu").manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
    drawn = torch.randn(alone.stored_shape, generator=generator, device=device)
    return alone.cut(drawn.mul_(slot.shape[1] ** -0.5))
