"""Linear layers with weights that are packed once; csrc/cpu/linear.h has the layout. The reference is F.linear."""

import ctypes
from collections.abc import Collection
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.cpu.memory import weight_zeros
from vllm_lite.kernels.cpu.weights.file_packer import GROUPED4, GROUPED5, GROUPED8, Packed
from vllm_lite.kernels.cpu.weights.gguf_blocks import pack_blocks
from vllm_lite.kernels.cpu.weights.grouped import pack_grouped, takes
from vllm_lite.kernels.cpu.weights.quantized import adopt_quantized, pack_quantized
from vllm_lite.kernels.cpu.weights.record import Record
from vllm_lite.kernels.gguf_blocks import BlockRows
from vllm_lite.kernels.grouped import GroupedWeight

QUANT_GROUP = 128
"""Maximum inputs of a quantized row that share a scale; kQuantGroup."""
ONE_PLANE = 32
"""Maximum inputs of a quantized row that share a scale and have 8 bits; kOnePlane. With weights of 5 or 8 bits, if one
input of such a group is far larger than the others, a quarter or half of the inputs have 15 bits. Larger groups have 15
bits throughout, except with VNNI and no AMX for weights that became int8 during loading. With weights of 4 bits all
inputs have 8 bits, in groups of at most this size; with AMX, larger groups have 15 bits here, too."""

_WIDTHS = {GROUPED4: "4 bits", GROUPED5: "5 bits", GROUPED8: "8 bits"}
_PACK_TYPES = (pointer, int64, int32, int64, int64, pointer)
_UNPACK_TYPES = (pointer, int64, int64, pointer, int64, pointer, int64, int32)
_LOOK_UP_TYPES = (pointer, int64, int64, int64, int64, pointer, int64, pointer, int64)
_LINEAR_TYPES = (pointer, pointer, int64, int32, pointer, int64, int32, int64)


class PackedWeight:
    """A weight [num_outputs, num_inputs] and its bias in the kernel's layout, in the weight's own dtype or grouped.

    If the machine multiplies bytes and the values of a grouped weight are whole numbers, products quantize each group
    of inputs of their rows to 8 or 15 bits (ONE_PLANE), unless `keep_rows` was called.
    """

    def __init__(
        self,
        weight: torch.Tensor | Packed | GroupedWeight | BlockRows,
        bias: torch.Tensor | None = None,
        *,
        form: Form | None = None,
    ) -> None:
        """weight: [num_outputs, num_inputs], bias: [num_outputs], both on the CPU. Copies them, except for a weight
        that is packed already. With a `form`, a dense weight is quantized to it. Raises ValueError for a weight without
        kernels."""
        if form is not None and isinstance(weight, torch.Tensor):
            made = _made_grouped(*pack_quantized(weight, form))
        else:
            made = _make(weight)
        record = made.record
        if bias is not None and bias.shape != (record.num_outputs,):
            raise ValueError(f"the bias must have {record.num_outputs} elements, got {list(bias.shape)}")
        self.num_outputs, self.num_inputs = int(record.num_outputs), int(record.num_inputs)
        self.dtype = made.dtype
        self.row_types = made.row_types
        self._tensors = made.tensors
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        record.bias = None if self._bias is None else self._bias.data_ptr()
        self._record = record
        self.address = ctypes.addressof(record)

    @staticmethod
    def takes(weight: GroupedWeight) -> bool:
        """Whether there are kernels for a grouped weight; if not, PackedWeight raises ValueError for it."""
        return takes(weight)

    @property
    def kind(self) -> tuple[int, int]:
        """Type code and group size of the weight. A kernel that takes several weights requires them to be of one
        kind."""
        return int(self._record.type), int(self._record.group_size)

    @property
    def form(self) -> str:
        """A description of the weight's numbers in memory, as for a user."""
        kind, group = self.kind
        if kind not in _WIDTHS:
            return str(self.dtype).removeprefix("torch.")
        return f"{_WIDTHS[kind]} (a scale for {min(group, self.num_inputs)} inputs)"

    def keep_rows(self) -> None:
        """Never quantize the rows of later products, not even of calls that are recorded already."""
        self._record.exact_rows = 1

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self._tensors, self._bias) if part is not None)

    def rows(self, ids: torch.Tensor, out: torch.Tensor, held: Split | None = None) -> None:
        """Copy rows of this weight as `look_up` does: out[i] = weight[ids[i]]. out: [n, num_inputs], in the weight's
        dtype, or in any float type if the weight is grouped."""
        if out.dtype not in self.row_types or out.stride(1) != 1:
            raise ValueError(f"rows of {self.dtype} cannot be copied into {out.dtype}")
        if out.shape != (len(ids), self.num_inputs):
            raise ValueError(f"out must be [{len(ids)}, {self.num_inputs}], got {list(out.shape)}")
        held = _held(held, self.num_outputs)
        wanted = int64_ids(ids)
        unpack = function("vllm_lite_unpack", _UNPACK_TYPES, int64)
        bad = unpack(
            self.address,
            held.start,
            held.total,
            wanted.data_ptr(),
            len(wanted),
            out.data_ptr(),
            out.stride(0),
            dtype_code(out.dtype),
        )
        _check_ids(wanted, bad, held)


class _Made(NamedTuple):
    """A packed weight without its bias, and the tensors whose addresses its record has."""

    record: Record
    dtype: torch.dtype
    row_types: Collection[torch.dtype]
    """Types in which its rows can be looked up."""
    tensors: tuple[torch.Tensor, ...]


def _make(weight: torch.Tensor | Packed | GroupedWeight | BlockRows) -> _Made:
    if isinstance(weight, GroupedWeight):
        return _made_grouped(*pack_grouped(weight))
    if isinstance(weight, BlockRows):
        return _made_grouped(*pack_blocks(weight))
    if isinstance(weight, Packed) and weight.form is not None:
        return _made_grouped(*adopt_quantized(weight, weight.form))
    data, num_outputs, num_inputs = _adopt(weight) if isinstance(weight, Packed) else _pack(weight)
    record = Record(data=data.data_ptr(), num_inputs=num_inputs, num_outputs=num_outputs, type=dtype_code(data.dtype))
    return _Made(record, data.dtype, (data.dtype,), (data,))


def _made_grouped(record: Record, tensors: tuple[torch.Tensor, ...]) -> _Made:
    return _Made(record, torch.uint8, tuple(FLOATS), tensors)


def _adopt(packed: Packed) -> tuple[torch.Tensor, int, int]:
    """Data, outputs and inputs of a weight that is packed already and not grouped."""
    return torch.frombuffer(packed.data, dtype=getattr(torch, packed.dtype)), packed.num_outputs, packed.num_inputs


def _pack(weight: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Pack a dense weight. Returns its data, outputs and inputs."""
    if weight.dtype not in FLOATS or weight.device.type != "cpu" or weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"a weight must be a matrix on the CPU, got {weight.dtype} {list(weight.shape)}")
    num_outputs, num_inputs = weight.shape
    size = function("vllm_lite_packed_size", (int64, int64), int64)(num_outputs, num_inputs)
    data = weight_zeros(size, weight.dtype)
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    function("vllm_lite_pack", _PACK_TYPES)(
        rows.data_ptr(),
        rows.stride(0),
        dtype_code(rows.dtype),
        num_outputs,
        num_inputs,
        data.data_ptr(),
    )
    return data, num_outputs, num_inputs


def int64_ids(ids: torch.Tensor) -> torch.Tensor:
    """ids, int [n], as contiguous int64."""
    return ids if ids.dtype == torch.int64 and ids.is_contiguous() else ids.to(torch.int64).contiguous()


def look_up(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, held: Split | None = None) -> bool:
    """An embedding lookup: out[i] = table[ids[i]]. ids: int [n], out: [n, size]. Returns False and does nothing if the
    table is not on the CPU, the dtypes or sizes differ, or rows are not contiguous.

    `held`: the ids whose rows the table has; the rows of other ids become zero. None: the table has all ids. Raises
    IndexError for an id that is not in [0, held.total).
    """
    size = table.shape[1]
    if table.device.type != "cpu" or table.dtype != out.dtype or out.shape != (len(ids), size):
        return False
    if not table.is_contiguous() or out.stride(1) != 1 or size == 0:
        return False
    held = _held(held, len(table))
    wanted, width = int64_ids(ids), table.itemsize
    bad = function("vllm_lite_look_up", _LOOK_UP_TYPES, int64)(
        table.data_ptr(),
        held.start,
        held.size,
        held.total,
        size * width,
        wanted.data_ptr(),
        len(wanted),
        out.data_ptr(),
        out.stride(0) * width,
    )
    _check_ids(wanted, bad, held)
    return True


def _held(held: Split | None, num_rows: int) -> Split:
    if held is None:
        return Split.whole(num_rows)
    if held.size != num_rows:
        raise ValueError(f"a table of {num_rows} rows cannot hold {held.size} of {held.total} ids")
    return held


def _check_ids(ids: torch.Tensor, bad: int, held: Split) -> None:
    if bad >= 0:
        raise IndexError(f"ids must lie in [0, {held.total}), got {int(ids[bad])}")


def multiplies_bytes() -> bool:
    """Whether products with integer weights quantize their rows: true with AVX2, AVX-512 and Arm's dot products."""
    return bool(function("vllm_lite_multiplies_bytes", (), int32)())


def linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """out = x W^T + bias. x: [num_rows, num_inputs]; out: [num_rows, num_outputs], in the dtype of x or float32.

    The sums are in float32. The result of a row depends only on the row, the weight and the instruction set.
    """
    if x.shape[1] != weight.num_inputs or out.shape != (x.shape[0], weight.num_outputs):
        raise ValueError(
            f"{list(x.shape)} -> {list(out.shape)} with {weight.num_outputs} x {weight.num_inputs} weights"
        )
    if x.dtype not in FLOATS or out.dtype not in (x.dtype, torch.float32) or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"rows must be contiguous floats, the same or float32 out, got {x.dtype} -> {out.dtype}")
    function("vllm_lite_linear", _LINEAR_TYPES)(
        weight.address,
        x.data_ptr(),
        x.stride(0),
        dtype_code(x.dtype),
        out.data_ptr(),
        out.stride(0),
        dtype_code(out.dtype),
        x.shape[0],
    )
