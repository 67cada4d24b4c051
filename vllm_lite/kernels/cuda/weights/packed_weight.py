"""GpuPackedWeight: a quantized weight as csrc/cuda/packed_linear.cuh reads it: codes of 4 or 8 bits, in the order of
the kernel's operands."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch

from vllm_lite.kernels.grouped import E2M1, E4M3, GroupedChunks, GroupedWeight

SPAN = 32
"""Inputs of a span: groups are whole spans."""
OUTPUTS = 64
"""Outputs are padded to a multiple of this."""
TILE = 16
TILE_BYTES = 512
ONE_GROUP = 30
"""The logarithm of the spans in a group if an output has one scale."""
PACKED_AT_ONCE = 1 << 26
"""Maximum elements packed at once, which bounds temporary memory."""
_UNITS = (1.0, 0.5, 0.25, 0.125)
"""Values may be multiples of these powers of two, by which scales are multiplied exactly."""
HALF_BYTES = ("INT4", "E2M1")
"""Kinds of codes with 4 bits."""


class _Numbers(NamedTuple):
    """Values of codes: unit * (offset + the kernel's value of a code), or float8."""

    codes: str  # name in csrc/cuda
    unit: float
    offset: float


class GpuPackedWeight(NamedTuple):
    """A packed weight, see csrc/cuda/packed_linear.cuh. Inputs are padded to whole chunks, outputs to OUTPUTS, with
    zeros."""

    shape: tuple[int, int]
    """[num_outputs, num_inputs], without padding."""
    codes: torch.Tensor
    """uint8 [tiles, num_chunks, 512]."""
    scales: torch.Tensor
    """[groups, padded outputs, 1 or 2], in the narrowest float dtype that is exact."""
    group_shift: int
    """Logarithm of the number of spans in a group."""
    kind: str
    """The kind of the codes, named as in csrc/cuda: INT4, E2M1, INT8, E4M3."""
    less: str
    """The meaning of the second number: NOTHING, ZEROS or MINIMA."""
    order: torch.Tensor | None
    """int64 [num_inputs]: see GroupedWeight."""

    @property
    def num_chunks(self) -> int:
        return self.codes.shape[1]

    @property
    def chunk_inputs(self) -> int:
        return chunk_inputs(self.kind)

    @property
    def padded(self) -> tuple[int, int]:
        """[outputs, inputs] in memory."""
        return TILE * self.codes.shape[0], self.num_chunks * self.chunk_inputs

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.order is None else self.order.nbytes)

    @staticmethod
    def takes(weight: GroupedWeight) -> bool:
        """Whether there are kernels for it: for consecutive integers, float4 and float8, in groups of a multiple of 32
        inputs."""
        return _numbers(weight.values) is not None and (
            weight.group_size % SPAN == 0 or weight.group_size >= weight.shape[1]
        )

    @classmethod
    def of(cls, weight: GroupedWeight | GroupedChunks, device: torch.device) -> Self:
        """Pack a weight on `device`. Raises ValueError unless `takes` it."""
        form = weight.form if isinstance(weight, GroupedChunks) else weight
        numbers = _numbers(form.values)
        if numbers is None or not cls.takes(form):
            raise ValueError(f"no kernel for {len(form.values)} values in groups of {form.group_size}")
        codes = _no_codes(weight.shape, numbers.codes, device)
        scales, minima, first = [form.scales[:0].to(device)], list[torch.Tensor](), 0
        for some in _chunks(weight):
            tiles = _tiles_of(some.codes.to(device), numbers.codes)
            codes[first : first + len(tiles)] = tiles
            first += len(tiles)
            scales.append(some.scales.to(device, torch.float32))
            minima += [] if some.minima is None else [some.minima.to(device, torch.float32)]
        whole = form._replace(scales=torch.cat(scales), minima=torch.cat(minima) if minima else None)
        return cls._with(codes, whole, weight.shape, numbers)

    @classmethod
    def _with(cls, codes: torch.Tensor, weight: GroupedWeight, shape: tuple[int, int], numbers: _Numbers) -> Self:
        """A weight with packed codes, and the scales, minima and order of `weight`, whose own codes are ignored."""
        num_outputs, num_inputs = shape
        scales, minima, size = _regrouped(weight)
        scales = scales * numbers.unit
        less, second = _less(scales, minima, numbers.offset)
        both = torch.stack((scales,) if second is None else (scales, second), dim=-1).transpose(0, 1)
        whole_chunks = num_inputs + -num_inputs % chunk_inputs(numbers.codes)
        groups = 1 if size >= num_inputs else -(-whole_chunks // size)  # the last may be padding only
        both = torch.nn.functional.pad(both, (0, 0, 0, -num_outputs % OUTPUTS, 0, groups - len(both)))
        return cls(
            shape=shape,
            codes=codes,
            scales=both.to(_narrowest(both)).contiguous(),
            group_shift=ONE_GROUP if size >= num_inputs else (size // SPAN).bit_length() - 1,
            kind=numbers.codes,
            less=less,
            order=None if weight.order is None else weight.order.to(codes.device),
        )


def chunk_inputs(kind: str) -> int:
    """Inputs in the 16 bytes that a lane loads at once."""
    return 2 * SPAN if kind in HALF_BYTES else SPAN


def _numbers(values: torch.Tensor) -> _Numbers | None:
    values = values.float().cpu()
    if len(values) == 256 and bool(((values == E4M3) | (values.isnan() & E4M3.isnan())).all()):
        return _Numbers("E4M3", 1.0, 0.0)
    if torch.equal(values, E2M1):
        return _Numbers("E2M1", 1.0, 0.0)
    for unit in _UNITS:
        whole = values / unit
        first = float(whole[0])
        if len(values) in (16, 256) and first == round(first) and torch.equal(whole - first, torch.arange(len(values))):
            kind, middle = ("INT4", 8) if len(values) == 16 else ("INT8", 128)
            return _Numbers(kind, unit, first + middle)
    return None


def _regrouped(weight: GroupedWeight) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Scales and minima of groups whose number of spans is a power of two, and the size of these groups."""
    size, num_inputs = weight.group_size, weight.shape[1]
    if size >= num_inputs:
        return weight.scales, weight.minima, num_inputs
    spans = size // SPAN
    own = spans & -spans  # the largest power of two that divides spans
    if own == spans:
        return weight.scales, weight.minima, size
    wanted = -(-num_inputs // (own * SPAN))
    repeated = (
        None if part is None else part.repeat_interleave(spans // own, dim=1)[:, :wanted]
        for part in (weight.scales, weight.minima)
    )
    scales, minima = repeated
    assert scales is not None  # noqa: S101 (for the types)
    return scales, minima, own * SPAN


def _less(scales: torch.Tensor, minima: torch.Tensor | None, offset: float) -> tuple[str, torch.Tensor | None]:
    """The kind and values of what is subtracted from scale * (the kernel's value of a code): small integers times the
    scale, or separate numbers."""
    if minima is None:
        return ("ZEROS", torch.full_like(scales, -offset)) if offset else ("NOTHING", None)
    minima = minima.to(scales.device, torch.float32)
    zeros = torch.where(scales != 0, minima / scales, 0).round()
    if bool((zeros * scales == minima).all()) and bool((zeros.abs() <= 255).all()):
        return "ZEROS", zeros - offset
    return "MINIMA", minima - offset * scales


def _narrowest(numbers: torch.Tensor) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return dtype
    return torch.float32


def _chunks(weight: GroupedWeight | GroupedChunks) -> Iterator[GroupedWeight]:
    """Chunks of outputs, whole tiles except the last."""
    if isinstance(weight, GroupedChunks):
        yield from weight.each()
        return
    at_once = max(1, PACKED_AT_ONCE // (OUTPUTS * max(1, weight.shape[1]))) * OUTPUTS
    for start in range(0, weight.shape[0], at_once):
        rows = slice(start, start + at_once)
        minima = None if weight.minima is None else weight.minima[rows]
        yield weight._replace(codes=weight.codes[rows], scales=weight.scales[rows], minima=minima)


def _no_codes(shape: tuple[int, int], kind: str, device: torch.device) -> torch.Tensor:
    """Zeroed memory for the codes of a weight: uint8 [tiles, num_chunks, TILE_BYTES]. Padding is read, but has no
    effect."""
    num_tiles, num_chunks = -(-shape[0] // OUTPUTS) * (OUTPUTS // TILE), -(-shape[1] // chunk_inputs(kind))
    return torch.zeros(num_tiles, num_chunks, TILE_BYTES, dtype=torch.uint8, device=device)


def _tiles_of(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Pack codes: uint8 [outputs, inputs] -> [tiles, num_chunks, TILE_BYTES]."""
    inputs, zero = chunk_inputs(kind), {"INT4": 8, "INT8": 128}.get(kind, 0)
    padding = (0, -codes.shape[1] % inputs, 0, -codes.shape[0] % TILE)
    codes = torch.nn.functional.pad(codes, padding, value=zero)
    # An output is [tile, h, r], an input [chunk, span, q, t, j, e].
    parts = codes.view(len(codes) // TILE, 2, 8, -1, inputs // SPAN, 4, 2, 2, 2)
    if kind in HALF_BYTES:
        halves = parts[:, 0] | parts[:, 1] << 4  # [tile, r, chunk, span, q, t, j, e]
        packed = halves.permute(0, 2, 1, 4, 3, 5, 7, 6)
    else:
        packed = parts.permute(0, 3, 2, 5, 4, 6, 7, 8, 1)
        packed = packed ^ 128 if kind == "INT8" else packed
    return packed.reshape(len(codes) // TILE, -1, TILE_BYTES)
