"""Native code for the blocks of GGUF files: unpacking them to codes and scales, and packing them for products. The
reference for unpacking is kernels/gguf_blocks.py; the reference for a packed weight is the floats that its blocks
encode."""

import ctypes
import math

import torch

from vllm_lite.checkpoint.gguf.kinds import NUMBERS
from vllm_lite.kernels.cpu.dtypes import dtype_code
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.cpu.memory import weight_zeros
from vllm_lite.kernels.cpu.weights.group_scales import BLOCK, INTEGERS, NO_MINIMA
from vllm_lite.kernels.cpu.weights.grouped import Values, grouped_size, int32_order, pack_grouped
from vllm_lite.kernels.cpu.weights.record import Record
from vllm_lite.kernels.gguf_blocks import BlockRows, Layout, is_native, layout, take_apart_by_rows
from vllm_lite.kernels.grouped import INT5, UINT5, GroupedWeight

_TAKE_APART_TYPES = (pointer, int64, int64)
_PACK_TYPES = (pointer, pointer, float32, int32)
FIVE_BITS = {"Q5_0": INT5, "Q5_1": UINT5, "Q5_K": UINT5}
"""Block type -> values of its codes, for the types that are packed in 5 bits."""


class _Rows(ctypes.Structure):
    """The same record as GgufRows in csrc/cpu/gguf.h."""

    _fields_ = (
        ("rows", pointer),
        ("stride", int64),
        ("num_rows", int64),
        ("blocks_per_row", int64),
        ("codes", pointer),
        ("scales", pointer),
        ("minima", pointer),
        ("scale_supers", pointer),
        ("minima_supers", pointer),
        ("type", int32),
        ("as_integers", int32),
    )

    @classmethod
    def of(cls, kind: str, rows: torch.Tensor, blocks_per_row: int) -> "_Rows":
        return cls(
            rows=rows.data_ptr(),
            stride=rows.stride(0),
            num_rows=len(rows),
            blocks_per_row=blocks_per_row,
            type=NUMBERS[kind],
        )


def take_apart(given: BlockRows) -> GroupedWeight:
    """Unpack blocks as `kernels.gguf_blocks.take_apart` does, bit for bit. Uses the library's threads if it knows the
    type."""
    own, blocks_per_row = layout(given)
    if not is_native(given.kind):
        return take_apart_by_rows(given)
    rows = _side_by_side(given.blocks)
    num_rows, num_inputs = len(rows), blocks_per_row * own.elements
    codes = torch.empty(num_rows, num_inputs, dtype=torch.uint8)
    scales = torch.empty(num_rows, num_inputs // own.group_size)
    minima = torch.empty_like(scales) if own.has_minima else None
    supers = torch.empty(2, num_rows, blocks_per_row)
    call = _Rows.of(given.kind, rows, blocks_per_row)
    call.codes, call.scales = codes.data_ptr(), scales.data_ptr()
    call.minima = None if minima is None else minima.data_ptr()
    call.scale_supers, call.minima_supers = supers[0].data_ptr(), supers[1].data_ptr()
    native = function("vllm_lite_take_apart", _TAKE_APART_TYPES, int32)
    _check(native(ctypes.addressof(call), *codes.shape[1:], *scales.shape[1:]), given.kind)
    return GroupedWeight(codes, own.values, scales, own.group_size, minima, given.order)


def pack_blocks(given: BlockRows) -> tuple[Record, tuple[torch.Tensor, ...]]:
    """Pack blocks as `grouped.pack_grouped` packs groups. Scales that are integers times a number of their block are
    kept in this form."""
    own, blocks_per_row = layout(given)
    rows = _side_by_side(given.blocks)
    if 0 in rows.shape or rows.device.type != "cpu":
        raise ValueError(f"blocks must be a matrix on the CPU, got {list(rows.shape)} on {rows.device.type}")
    if not is_native(given.kind):
        return pack_grouped(take_apart_by_rows(given))
    values = Values.of(FIVE_BITS.get(given.kind, own.values))
    scale_type = _scale_type(given.kind, own)
    record = values.record((len(rows), blocks_per_row * own.elements), own.group_size)
    record.scale_type, record.minima_type = scale_type, scale_type if own.has_minima else NO_MINIMA
    order = int32_order(given.order, blocks_per_row * own.elements)
    record.order = None if order is None else order.data_ptr()
    supers = None
    if own.has_supers:
        shape = -(-len(rows) // BLOCK), blocks_per_row, 2, BLOCK
        supers = weight_zeros(math.prod(shape), torch.float32).view(shape)
        record.supers = supers.data_ptr()
    data = weight_zeros(grouped_size(record), torch.uint8)
    record.data = data.data_ptr()
    call = _Rows.of(given.kind, rows, blocks_per_row)
    native = function("vllm_lite_pack_blocks", _PACK_TYPES, int32)
    less = int(values.floats[0] - own.values[0]) if given.kind in FIVE_BITS else 0
    _check(native(ctypes.addressof(record), ctypes.addressof(call), values.unit, less), given.kind)
    return record, tuple(part for part in (data, *values.tensors, supers, order) if part is not None)


def _scale_type(kind: str, own: Layout) -> int:
    """A type that stores the scales of all blocks exactly. The scales of MXFP4 are powers of two with a wider range
    than that of float16."""
    if own.has_supers:
        return INTEGERS
    return dtype_code(torch.bfloat16 if kind == "MXFP4" else torch.float16)


def _side_by_side(blocks: torch.Tensor) -> torch.Tensor:
    return blocks if blocks.stride(1) == 1 else blocks.contiguous()


def _check(is_known: int, kind: str) -> None:
    if not is_known:
        raise ValueError(f"the native library knows no blocks of type {kind}")
