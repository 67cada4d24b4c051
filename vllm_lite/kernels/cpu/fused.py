"""`CpuOps`: native versions of the small operations between matrix products. Kernels: csrc/cpu/fused.cpp,
elementwise.cpp."""

from typing import NamedTuple

import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.cpu.routing import NativeRouter
from vllm_lite.kernels.cpu.weights.linear import look_up
from vllm_lite.kernels.ops import Rotation, TorchOps, WideNormWeights
from vllm_lite.kernels.routing import Chosen, Routing

KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "swiglu_oai": 4, "relu2": 5}
"""The same numbers as Activation in csrc/cpu/elementwise.h."""

_FLOAT32 = DTYPES[torch.float32]

_RMS_NORM = (int32, int64, int64, int64, float32, pointer, int64, int64, pointer, pointer, int64, int64)
_ADD_RMS_NORM = (int32, int64, int64, float32, pointer, int64, pointer, int64, pointer, pointer, int64)
_WIDE_NORM = (
    int32, int32, int64, int64, int64, float32, pointer, int64, int64, pointer, pointer, int64, pointer, int64, int64
)  # fmt: skip
_ADD_WIDE_NORM = (
    int32, int32, int64, int64, float32, pointer, int64, pointer, int64, pointer, pointer, pointer, int64
)  # fmt: skip
_ACTIVATE = (int32, int32, int64, int64, pointer, int64)
_GATED_ACTIVATION = (int32, int32, int64, int64, pointer, int64, pointer, int64)
_ADD = (int32, int64, int64, pointer, int64, pointer, int64)
_ADD_ROWS = (int32, int64, int64, pointer, int64, pointer, int64, int64, pointer)
_SCALE = (int32, int64, int64, pointer, int64, float32)
_CLAMP = (int32, int64, int64, pointer, int64, float32)
_SCALE_ROWS = (int32, int64, int64, int64, pointer, int64, int64, pointer, int64, pointer)
_SCALE_AND_CAP = (int64, int64, pointer, int64, float32, float32)
_ADD_GATED = (int32, int64, int64, pointer, int64, pointer, int64, pointer, int64)
_SIGMOID_GATE = (int32, int64, int64, pointer, int64, pointer, int64)
_GATE_HEADS = (int32, int64, int64, int64, pointer, int64, pointer, int64)
_XIELU = (int32, int64, int64, pointer, int64, pointer)
_ROTATE = (int32, int64, int64, int64, pointer, int64, int64, pointer, int64, int64, pointer, pointer, int64)
_TAKE_ROWS = (pointer, int64, int64, int64, pointer, int64, pointer, int64)
_SELECT = (int32, int64, int64, pointer, int64, pointer, pointer, pointer, int64)


MOST_COPIED = 1024
"""Maximum rows that are copied natively: the maximum of a recorded step."""
_IN_ORDER = torch.arange(MOST_COPIED)


class CpuOps(TorchOps):
    """Operations by native kernels. TorchOps computes the cases that they do not support, such as float64 or rows of
    more axes.

    Raises IndexError for a position that is not in a table.
    """

    def __init__(self) -> None:
        self._rms_norm = function("vllm_lite_rms_norm", _RMS_NORM)
        self._add_rms_norm = function("vllm_lite_add_rms_norm", _ADD_RMS_NORM)
        self._wide_norm = function("vllm_lite_wide_norm", _WIDE_NORM)
        self._add_wide_norm = function("vllm_lite_add_wide_norm", _ADD_WIDE_NORM)
        self._activate = function("vllm_lite_activate", _ACTIVATE)
        self._gated_activation = function("vllm_lite_gated_activation", _GATED_ACTIVATION)
        self._add = function("vllm_lite_add", _ADD)
        self._add_rows = function("vllm_lite_add_rows", _ADD_ROWS, int64)
        self._scale = function("vllm_lite_scale", _SCALE)
        self._clamp = function("vllm_lite_clamp", _CLAMP)
        self._scale_rows = function("vllm_lite_scale_rows", _SCALE_ROWS, int64)
        self._scale_and_cap = function("vllm_lite_scale_and_cap", _SCALE_AND_CAP)
        self._rotate = function("vllm_lite_rotate", _ROTATE)
        self._add_gated = function("vllm_lite_add_gated", _ADD_GATED)
        self._sigmoid_gate = function("vllm_lite_sigmoid_gate", _SIGMOID_GATE)
        self._gate_heads = function("vllm_lite_gate_heads", _GATE_HEADS)
        self._xielu = function("vllm_lite_xielu", _XIELU)
        self._take_rows = function("vllm_lite_take_rows", _TAKE_ROWS, int64)
        self._router: tuple[Routing, NativeRouter] | None = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        code, rows = _code(x, weight, out), _norm_rows(x, out)
        if code is None or rows is None or weight.shape != x.shape[-1:]:
            return super().rms_norm(x, weight, eps, out)
        self._rms_norm(
            code, rows.outer, rows.inner, rows.size, eps,
            x.data_ptr(), *rows.x_steps, weight.data_ptr(), out.data_ptr(), *rows.out_steps,
        )  # fmt: skip
        return None

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        shape = residual.shape
        code = _code(residual, x, out, weight)
        if code is None or len(shape) != 2 or not x.shape == out.shape == shape or weight.shape != shape[1:]:
            return super().add_rms_norm(residual, x, weight, eps, out)
        self._add_rms_norm(
            code, shape[0], shape[1], eps, residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0),
            weight.data_ptr(), out.data_ptr(), out.stride(0),
        )  # fmt: skip
        return None

    def wide_norm(self, x: torch.Tensor, norm: WideNormWeights, out: torch.Tensor) -> None:
        own = x.shape[1:] if norm.weight.dim() == 2 else x.shape[-1:]
        code, rows, weights = _code(x, out), _norm_rows(x, out), _wide_weights(norm, own)
        if code is None or rows is None or weights is None:
            return super().wide_norm(x, norm, out)
        self._wide_norm(
            code, norm.centered, rows.outer, rows.inner, rows.size, norm.eps, x.data_ptr(), *rows.x_steps,
            *weights, norm.weight.stride(0) if norm.weight.dim() == 2 else 0, out.data_ptr(), *rows.out_steps,
        )  # fmt: skip
        return None

    def add_wide_norm(self, residual: torch.Tensor, x: torch.Tensor, norm: WideNormWeights, out: torch.Tensor) -> None:
        shape = residual.shape
        code, weights = _code(residual, x, out), _wide_weights(norm, shape[-1:])
        if code is None or weights is None or len(shape) != 2 or not x.shape == out.shape == shape:
            return super().add_wide_norm(residual, x, norm, out)
        self._add_wide_norm(
            code, norm.centered, shape[0], shape[1], norm.eps, residual.data_ptr(), residual.stride(0),
            x.data_ptr(), x.stride(0), *weights, out.data_ptr(), out.stride(0),
        )  # fmt: skip
        return None

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        if not self._turn(heads, rotation, heads):
            super().rotate(heads, rotation)

    def rotate_into(self, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> None:
        if heads.shape != out.shape or not self._turn(heads, rotation, out):
            super().rotate_into(heads, rotation, out)

    def _turn(self, heads: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> bool:
        """Rotate `heads` into `out`. Returns False and does nothing if the kernel does not support these tensors."""
        cos, sin = rotation
        code = _code(heads, cos, sin, out)
        num_tokens, num_heads, head_size = heads.shape
        if code is None or not cos.shape == sin.shape == (num_tokens, head_size) or cos.stride() != sin.stride():
            return False
        self._rotate(
            code, num_tokens, num_heads, head_size, heads.data_ptr(), heads.stride(0), heads.stride(1),
            out.data_ptr(), out.stride(0), out.stride(1), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        )  # fmt: skip
        return True

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        shape, code = residual.shape, _code(residual, x)
        if code is None or len(shape) != 2 or x.shape != shape:
            return super().add(residual, x)
        self._add(code, *shape, residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0))
        return None

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copy by a lookup of all rows in order, which a program can record."""
        count, size = x.shape if x.dim() == 2 else (0, 0)
        if not size or count > MOST_COPIED or out.shape != x.shape or not look_up(x, _IN_ORDER[:count], out):
            super().copy(x, out)

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        size, width, steps = x[0].numel() if len(x) else 0, x.itemsize, (x.stride(0), out.stride(0))
        if not size or x.dtype != out.dtype or not _have_dense_rows(x, out) or not _are_positions(ids, out, out.dim()):
            return super().take_rows(x, ids, out)
        bad = self._take_rows(
            x.data_ptr(), steps[0] * width, len(x), size * width,
            ids.data_ptr(), len(ids), out.data_ptr(), steps[1] * width,
        )  # fmt: skip
        if bad >= 0:
            raise IndexError(f"there are {len(x)} rows, and row {int(ids[bad])} is asked for")
        return None

    def scale(self, x: torch.Tensor, factor: float) -> None:
        code = _code(x)
        if code is None or x.dim() != 2:
            return super().scale(x, factor)
        self._scale(code, *x.shape, x.data_ptr(), x.stride(0), factor)
        return None

    def clamp(self, x: torch.Tensor, limit: float) -> None:
        code = _code(x)
        if code is None or x.dim() != 2:
            return super().clamp(x, limit)
        self._clamp(code, *x.shape, x.data_ptr(), x.stride(0), limit)
        return None

    def scale_rows(self, heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        code, wide = _code(heads), _code(table)
        if code is None or wide != _FLOAT32 or table.dim() != 1 or not _are_positions(positions, heads, 3):
            return super().scale_rows(heads, table, positions)
        bad = self._scale_rows(
            code, *heads.shape, heads.data_ptr(), heads.stride(0), heads.stride(1),
            table.data_ptr(), len(table), positions.data_ptr(),
        )  # fmt: skip
        _check_positions(bad, positions, table)
        return None

    def add_rows(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        code = _code(x, table)
        if code is None or table.dim() != 2 or table.shape[1:] != x.shape[1:] or not _are_positions(positions, x, 2):
            return super().add_rows(x, table, positions)
        bad = self._add_rows(
            code, *x.shape, x.data_ptr(), x.stride(0), table.data_ptr(), table.stride(0), len(table),
            positions.data_ptr(),
        )  # fmt: skip
        _check_positions(bad, positions, table)
        return None

    def activate(self, kind: Activation, x: torch.Tensor) -> None:
        code = _code(x)
        if code is None or x.dim() != 2:
            return super().activate(kind, x)
        self._activate(code, KINDS[kind], *x.shape, x.data_ptr(), x.stride(0))
        return None

    def activate_and_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        code, shape = _code(gate_up, out), out.shape
        if code is None or len(shape) != 2 or gate_up.shape != (shape[0], 2 * shape[1]):
            return super().activate_and_mul(kind, gate_up, out)
        self._gated_activation(
            code, KINDS[kind], *shape, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0)
        )
        return None

    def scale_and_cap(self, logits: torch.Tensor, factor: float, cap: float) -> None:
        if _code(logits) != _FLOAT32 or logits.dim() != 2:
            return super().scale_and_cap(logits, factor, cap)
        self._scale_and_cap(*logits.shape, logits.data_ptr(), logits.stride(0), factor, cap)
        return None

    def route(self, logits: torch.Tensor, routing: Routing, chosen: Chosen) -> None:
        if self._router is None or self._router[0] is not routing:
            self._router = routing, NativeRouter(routing)
        if not self._router[1].route(logits, chosen):
            super().route(logits, routing, chosen)

    def add_gated(self, residual: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> None:
        shape, code = residual.shape, _code(residual, x)
        if code is None or _code(gates) != _FLOAT32 or len(shape) != 2 or x.shape != shape or len(gates) != shape[0]:
            return super().add_gated(residual, x, gates)
        self._add_gated(
            code, *shape, residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0),
            gates.data_ptr(), gates.stride(0),
        )  # fmt: skip
        return None

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> None:
        code = _code(x, gate)
        if code is None or x.dim() != 2 or gate.shape != x.shape:
            return super().sigmoid_gate(x, gate)
        self._sigmoid_gate(code, *x.shape, x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0))
        return None

    def gate_heads(self, heads: torch.Tensor, gate: torch.Tensor) -> None:
        code = _code(heads, gate)
        if code is None or heads.dim() != 3 or gate.shape != heads.shape[:2] or heads.stride(1) != heads.shape[2]:
            return super().gate_heads(heads, gate)
        self._gate_heads(code, *heads.shape, heads.data_ptr(), heads.stride(0), gate.data_ptr(), gate.stride(0))
        return None

    def xielu(self, x: torch.Tensor, factors: torch.Tensor) -> None:
        code = _code(x)
        if code is None or x.dim() != 2:
            return super().xielu(x, factors)
        self._xielu(code, *x.shape, x.data_ptr(), x.stride(0), factors.data_ptr())
        return None


def select_rotation(
    table: torch.Tensor,  # float32 [max_position, 2, half], contiguous
    positions: torch.Tensor,  # int64 [num_tokens], contiguous
    out: Rotation,  # both with rows of one stride
) -> bool:
    """Copy the rows of a RotaryEmbedding's table at `positions` to `out`, in its dtype. Returns False and does nothing
    if the kernel does not support the tensors. Raises IndexError for a position that is not in the table."""
    cos, sin = out
    code = _code(cos, sin)
    if code is None or positions.dtype != torch.int64 or not positions.is_contiguous() or cos.stride() != sin.stride():
        return False
    max_position, _, half = table.shape
    bad = function("vllm_lite_select_rotation", _SELECT, int64)(
        code, len(positions), half, table.data_ptr(), max_position, positions.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), cos.stride(0),
    )  # fmt: skip
    _check_positions(bad, positions, table)
    return True


class _NormRows(NamedTuple):
    """The rows of two tensors of one shape, [outer, size] or [outer, inner, size]."""

    outer: int
    inner: int
    size: int
    x_steps: tuple[int, ...]  # strides of the outer and the inner axis
    out_steps: tuple[int, ...]


def _norm_rows(x: torch.Tensor, out: torch.Tensor) -> _NormRows | None:
    """Sizes and strides of the rows of x and out; None if the tensors have other shapes."""
    shape, steps, out_steps = x.shape, x.stride(), out.stride()
    if out.shape != shape:
        return None
    if len(shape) == 2:
        return _NormRows(shape[0], 1, shape[1], (steps[0], 0), (out_steps[0], 0))
    if len(shape) == 3:
        return _NormRows(shape[0], shape[1], shape[2], steps[:2], out_steps[:2])
    return None


def _wide_weights(norm: WideNormWeights, shape: torch.Size) -> tuple[int, int | None] | None:
    """Addresses of weight and bias, None for no bias. Returns None if one of them is not float32 of this shape, or if
    their strides differ."""
    weight, bias = norm.weight, norm.bias
    for tensor in (weight,) if bias is None else (weight, bias):
        if tensor.shape != shape or _code(tensor) != _FLOAT32 or tensor.stride() != weight.stride():
            return None
    return weight.data_ptr(), None if bias is None else bias.data_ptr()


def _have_dense_rows(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the rows x[i] and out[i] have one shape and are contiguous."""
    return x.shape[1:] == out.shape[1:] and x[:1].is_contiguous() and out[:1].is_contiguous()


def _are_positions(positions: torch.Tensor, x: torch.Tensor, axes: int) -> bool:
    """Whether `positions` is a contiguous int64 [len(x)] and x has `axes` axes."""
    return (
        positions.dtype == torch.int64
        and positions.is_contiguous()
        and x.dim() == axes
        and positions.shape == x.shape[:1]
    )


def _check_positions(bad: int, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Raise IndexError if a kernel found a position, at index `bad`, that is not in the table."""
    if bad >= 0:
        raise IndexError(f"position {int(positions[bad])} is outside of the model's {len(table)}")


def _code(*tensors: torch.Tensor) -> int | None:
    """Code of the tensors' common dtype; None if the dtypes differ, if it is not one of FLOATS, or if a last axis is
    not contiguous."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.stride()[-1] != 1:
            return None
    return DTYPES[dtype] if dtype in FLOATS else None
