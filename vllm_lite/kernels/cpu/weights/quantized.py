"""Quantization of dense weights to grouped ones on load, see csrc/cpu/quantize.h. The reference is `quantize` of
kernels/grouped.py."""

import ctypes

import torch

from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.cpu.memory import weight_zeros
from vllm_lite.kernels.cpu.weights.file_packer import FORMS, Packed, group_size
from vllm_lite.kernels.cpu.weights.record import QUANTIZED_TYPES, Record
from vllm_lite.kernels.grouped import VALUES

_PACK_TYPES = (pointer, int64, int32, int64, int64, int32, int64, pointer, pointer)


def pack_quantized(weight: torch.Tensor, form: Form) -> tuple[Record, tuple[torch.Tensor, ...]]:
    """Quantize and pack a weight, float [num_outputs, num_inputs] on the CPU. Returns its record, without a bias, and
    the tensors whose addresses the record has. Raises ValueError for other tensors."""
    if weight.dtype not in FLOATS or weight.device.type != "cpu" or weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be a matrix on the CPU, got {weight.dtype} {list(weight.shape)}")
    num_outputs, num_inputs = weight.shape
    record, num_bytes, num_supers = _record(num_outputs, num_inputs, form)
    data = weight_zeros(num_bytes, torch.uint8)
    supers = weight_zeros(num_supers, torch.float32) if num_supers else None
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    function("vllm_lite_pack_quantized", _PACK_TYPES)(
        rows.data_ptr(),
        rows.stride(0),
        dtype_code(rows.dtype),
        num_outputs,
        num_inputs,
        FORMS[form],
        group_size(form),
        data.data_ptr(),
        None if supers is None else supers.data_ptr(),
    )
    return _named(record, data, supers, form)


def adopt_quantized(packed: Packed, form: Form) -> tuple[Record, tuple[torch.Tensor, ...]]:
    """The results of `pack_quantized` for a weight that is packed already."""
    record, _, _ = _record(packed.num_outputs, packed.num_inputs, form)
    data = torch.frombuffer(packed.data, dtype=torch.uint8)
    supers = None if packed.supers is None else torch.frombuffer(packed.supers, dtype=torch.float32)
    return _named(record, data, supers, form)


def _record(num_outputs: int, num_inputs: int, form: Form) -> tuple[Record, int, int]:
    """The record without addresses, and the numbers of bytes and supers that it needs."""
    record, num_supers = Record(), int64()
    fill = function("vllm_lite_quantized_weight", QUANTIZED_TYPES, int64)
    own = FORMS[form], group_size(form)
    num_bytes = fill(num_outputs, num_inputs, *own, ctypes.addressof(record), ctypes.addressof(num_supers))
    return record, int(num_bytes), num_supers.value


def _named(
    record: Record, data: torch.Tensor, supers: torch.Tensor | None, form: Form
) -> tuple[Record, tuple[torch.Tensor, ...]]:
    """Fill in the addresses and the values of the codes. Returns the record and the tensors that it refers to."""
    values = VALUES[form].clone()
    record.data, record.values = data.data_ptr(), values.data_ptr()
    record.supers = None if supers is None else supers.data_ptr()
    record.are_whole = form != "fp8"
    record.offset = int(values[0]) if record.are_whole else 0
    return record, tuple(part for part in (data, values, supers) if part is not None)
