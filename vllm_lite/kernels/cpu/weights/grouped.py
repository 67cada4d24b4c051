"""Grouped weights in the layout of csrc/cpu/linear.h: what of them is packed how. Their plain twin is `dequantize`."""

import ctypes
from typing import NamedTuple

import torch

from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.cpu.memory import weight_zeros
from vllm_lite.kernels.cpu.weights.file_packer import GROUPED4, GROUPED5, GROUPED8
from vllm_lite.kernels.cpu.weights.group_scales import GroupScales
from vllm_lite.kernels.cpu.weights.record import Record
from vllm_lite.kernels.grouped import INT4, GroupedWeight

LARGEST_GROUP = 128
"""Inputs; larger groups are packed as several of this size."""
GROUP_SIZES = (16, 32, 64, 128)
TYPES = {16: GROUPED4, 32: GROUPED5, 256: GROUPED8}
"""By the number of values."""
_UNITS = (1.0, 0.5, 0.25, 0.125)
"""Candidate units: the largest of which all values are multiples is taken. Units are powers of two, so scales stay
exact when they are multiplied by one."""

_QUANTIZE_TYPES = (pointer, int64, int32, int64, int64, int64, pointer, pointer)
_PACK_TYPES = (pointer, pointer, int64, pointer, pointer)


def takes(weight: GroupedWeight) -> bool:
    """Whether `pack_grouped` can pack it: in groups that make up 128 or are made up of 128. Codes of 5 bits have to
    stand for whole numbers that follow one another."""
    if len(weight.values) not in TYPES or _packed_group(weight) is None:
        return False
    return len(weight.values) != 32 or Values.of(weight.values).offset is not None


class Values(NamedTuple):
    """Values of codes, as kernels want them."""

    floats: torch.Tensor
    """float32 [16], [32] or [256]: multiples of `unit`, counted in it."""
    unit: float
    """A power of two, which scales take over."""
    offset: int | None
    """The least, if all are whole numbers that a byte holds when they are counted from it."""
    table: torch.Tensor | None
    """uint8 [16]: those bytes. None: they are the codes."""

    @classmethod
    def of(cls, values: torch.Tensor) -> "Values":
        floats, unit, offset = _whole_values(values)
        table = _table(floats, offset) if offset is not None and len(floats) == 16 else None
        return cls(floats, unit, offset, table)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.floats,) if self.table is None else (self.floats, self.table)

    def record(self, shape: tuple[int, int], group_size: int) -> Record:
        """The record of a weight [num_outputs, num_inputs] in groups as they are packed, without its memory and the
        types of its scales. It names `tensors`."""
        return Record(
            num_outputs=shape[0],
            num_inputs=shape[1],
            type=TYPES[len(self.floats)],
            group_size=group_size,
            values=self.floats.data_ptr(),
            bytes=None if self.table is None else self.table.data_ptr(),
            offset=self.offset or 0,
            are_whole=self.offset is not None,
        )

    def lower(self, shift: int) -> "Values":
        """Values of codes that have been raised by `shift`."""
        return self if self.offset is None else self._replace(floats=self.floats - shift, offset=self.offset - shift)


def pack_grouped(weight: GroupedWeight) -> tuple[Record, tuple[torch.Tensor, ...]]:
    """Its record, without a bias, and the memory that this names. Raises ValueError for what `takes` does not."""
    group_size = _packed_group(weight)
    if group_size is None or not takes(weight):
        raise ValueError(
            f"a grouped weight must have 16, 256 or 32 whole values, and groups of {GROUP_SIZES} or a multiple of "
            f"{LARGEST_GROUP}; got {len(weight.values)} values and groups of {weight.group_size}"
        )
    if weight.codes.dtype != torch.uint8 or weight.codes.device.type != "cpu" or 0 in weight.shape:
        raise ValueError(f"codes must be a matrix of bytes on the CPU, got {weight.codes.dtype} {list(weight.shape)}")
    given = Values.of(weight.values)
    may_shift = given.offset is not None and len(given.floats) == 16 and given.table is None
    scales = GroupScales.of(weight, group_size, given.unit, may_shift=may_shift)
    codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
    values, order = given.lower(scales.shift), int32_order(weight.order, weight.shape[1])
    record = values.record(weight.shape, group_size)
    record.scale_type, record.minima_type = scales.scale_type, scales.minima_type
    record.order = None if order is None else order.data_ptr()
    data = weight_zeros(grouped_size(record), torch.uint8)
    record.data = data.data_ptr()
    function("vllm_lite_pack_grouped", _PACK_TYPES)(
        ctypes.addressof(record),
        codes.data_ptr(),
        codes.stride(0),
        scales.scales.data_ptr(),
        None if scales.minima is None else scales.minima.data_ptr(),
    )
    return record, tuple(part for part in (data, *values.tensors, order) if part is not None)


def grouped_size(record: Record) -> int:
    """Bytes that a weight takes packed."""
    return int(function("vllm_lite_grouped_size", (pointer,), int64)(ctypes.addressof(record)))


def quantize4(weight: torch.Tensor, group_size: int) -> GroupedWeight:
    """As `kernels.grouped.quantize4`, for a matrix of floats on the CPU; sums are added in another order, which may
    decide between two scales that are as good."""
    if weight.dtype not in FLOATS or weight.device.type != "cpu" or weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be a matrix on the CPU, got {weight.dtype} {list(weight.shape)}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, got {group_size}")
    num_outputs, num_inputs = weight.shape
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales = torch.empty(num_outputs, -(-num_inputs // group_size))
    function("vllm_lite_quantize4", _QUANTIZE_TYPES)(
        rows.data_ptr(),
        rows.stride(0),
        dtype_code(rows.dtype),
        num_outputs,
        num_inputs,
        group_size,
        codes.data_ptr(),
        scales.data_ptr(),
    )
    return GroupedWeight(codes, INT4, scales, group_size)


def int32_order(order: torch.Tensor | None, num_inputs: int) -> torch.Tensor | None:
    """The order of columns as records have it. Raises ValueError for what is no order."""
    if order is None:
        return None
    if not torch.equal(order.sort().values, torch.arange(num_inputs)):
        raise ValueError(f"the order of columns must name each of the {num_inputs} inputs once")
    return order.to(torch.int32).contiguous()


def _packed_group(weight: GroupedWeight) -> int | None:
    """The size of groups as they are packed."""
    if weight.group_size in GROUP_SIZES:
        return weight.group_size
    if weight.group_size >= weight.shape[1] or weight.group_size % LARGEST_GROUP == 0:
        return LARGEST_GROUP
    return None


def _whole_values(given: torch.Tensor) -> tuple[torch.Tensor, float, int | None]:
    """Values, what they are to be multiplied by, and the least, if they are whole numbers that bytes can hold, counted
    from the least; those of more than 4 bits must follow one another as well, as there is no table for them."""
    for unit in _UNITS:
        values = given.to(torch.float32) / unit
        least = float(values.min())
        if not bool((values == values.round()).all()) or float(values.max()) - least > 255 or abs(least) > 255:
            continue
        if len(values) == 16 or torch.equal(values - least, torch.arange(float(len(values)))):
            return values.contiguous(), unit, int(least)
    return given.to(torch.float32).contiguous(), 1.0, None


def _table(values: torch.Tensor, offset: int) -> torch.Tensor | None:
    """uint8 [16]: the bytes that codes stand for. None: they are the codes."""
    table = values - offset
    return None if torch.equal(table, torch.arange(16.0)) else table.to(torch.uint8)
