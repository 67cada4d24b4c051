"""Packing of grouped weights into the layout of csrc/cpu/linear.h. The reference is `dequantize`."""

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
"""Maximum inputs of a packed group; a larger group is packed as several groups of this size."""
GROUP_SIZES = (16, 32, 64, 128)
TYPES = {16: GROUPED4, 32: GROUPED5, 256: GROUPED8}
"""Number of values -> type code."""
_UNITS = (1.0, 0.5, 0.25, 0.125)
"""Candidate units: the largest of which all values are multiples is taken. Units are powers of two, so scales stay
exact when they are multiplied by one."""

_QUANTIZE_TYPES = (pointer, int64, int32, int64, int64, int64, pointer, pointer)
_PACK_TYPES = (pointer, pointer, int64, pointer, pointer)


def takes(weight: GroupedWeight) -> bool:
    """Whether `pack_grouped` can pack the weight: its group size must be in GROUP_SIZES, a multiple of 128, or cover a
    whole row. The values of 5-bit codes must be consecutive whole numbers."""
    if len(weight.values) not in TYPES or _packed_group(weight) is None:
        return False
    return len(weight.values) != 32 or Values.of(weight.values).offset is not None


class Values(NamedTuple):
    """Values of codes, in the form for kernels."""

    floats: torch.Tensor
    """float32 [16], [32] or [256]: the values divided by `unit`."""
    unit: float
    """A power of two by which scales are multiplied instead."""
    offset: int | None
    """The smallest value, if all values are whole numbers and fit into a byte after it is subtracted; else None."""
    table: torch.Tensor | None
    """uint8 [16]: the byte of each code, its value minus `offset`. None: the codes are these bytes."""

    @classmethod
    def of(cls, values: torch.Tensor) -> "Values":
        floats, unit, offset = _whole_values(values)
        table = _table(floats, offset) if offset is not None and len(floats) == 16 else None
        return cls(floats, unit, offset, table)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.floats,) if self.table is None else (self.floats, self.table)

    def record(self, shape: tuple[int, int], group_size: int) -> Record:
        """The record of a weight [num_outputs, num_inputs] in packed groups of `group_size`, without its memory and the
        types of its scales. It has the addresses of `tensors`."""
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
        """The values for codes to which `shift` was added."""
        return self if self.offset is None else self._replace(floats=self.floats - shift, offset=self.offset - shift)


def pack_grouped(weight: GroupedWeight) -> tuple[Record, tuple[torch.Tensor, ...]]:
    """Pack a weight. Returns its record, without a bias, and the tensors whose addresses the record has. Raises
    ValueError for a weight that `takes` refuses."""
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
    """Bytes of a packed weight."""
    return int(function("vllm_lite_grouped_size", (pointer,), int64)(ctypes.addressof(record)))


def quantize4(weight: torch.Tensor, group_size: int) -> GroupedWeight:
    """Quantize as `kernels.grouped.quantize4` does, a matrix of floats on the CPU. Sums are added up in another order,
    so of two equally good scales it may choose the other."""
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
    """The order of columns for a record, int32 [num_inputs]. Raises ValueError unless it is a permutation."""
    if order is None:
        return None
    if not torch.equal(order.sort().values, torch.arange(num_inputs)):
        raise ValueError(f"the order of columns must name each of the {num_inputs} inputs once")
    return order.to(torch.int32).contiguous()


def _packed_group(weight: GroupedWeight) -> int | None:
    """The size of packed groups; None if the weight cannot be packed."""
    if weight.group_size in GROUP_SIZES:
        return weight.group_size
    if weight.group_size >= weight.shape[1] or weight.group_size % LARGEST_GROUP == 0:
        return LARGEST_GROUP
    return None


def _whole_values(given: torch.Tensor) -> tuple[torch.Tensor, float, int | None]:
    """The fields `floats`, `unit` and `offset` of Values. Codes of more than 4 bits have an offset only if their values
    are consecutive, because they have no table."""
    for unit in _UNITS:
        values = given.to(torch.float32) / unit
        least = float(values.min())
        if not bool((values == values.round()).all()) or float(values.max()) - least > 255 or abs(least) > 255:
            continue
        if len(values) == 16 or torch.equal(values - least, torch.arange(float(len(values)))):
            return values.contiguous(), unit, int(least)
    return given.to(torch.float32).contiguous(), 1.0, None


def _table(values: torch.Tensor, offset: int) -> torch.Tensor | None:
    """The field `table` of Values."""
    table = values - offset
    return None if torch.equal(table, torch.arange(16.0)) else table.to(torch.uint8)
