"""`CpuOps`: the small operations between matrix products, natively. Kernels: csrc/cpu/fused.cpp and isa/fused.cpp."""

import torch

from vllm_lite.checkpoint.activation import Activation
from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import float32, function, int32, int64, pointer
from vllm_lite.kernels.ops import Rotation, TorchOps

_KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}

_RMS_NORM = (int32, int64, int64, int64, float32, pointer, int64, int64, pointer, pointer, int64, int64)
_ADD_RMS_NORM = (int32, int64, int64, float32, pointer, int64, pointer, int64, pointer, pointer, int64)
_ACTIVATION = (int32, int32, int64, int64, pointer, int64, pointer, int64)
_ROTATE = (int32, int64, int64, int64, pointer, int64, int64, pointer, pointer, int64)
_SELECT = (int32, int64, int64, pointer, int64, pointer, pointer, pointer, int64)


class CpuOps(TorchOps):
    """What the kernels do not take, such as float64 or rows of more axes, is computed by TorchOps."""

    def __init__(self) -> None:
        self._rms_norm = function("vllm_lite_rms_norm", _RMS_NORM)
        self._add_rms_norm = function("vllm_lite_add_rms_norm", _ADD_RMS_NORM)
        self._activation = function("vllm_lite_gated_activation", _ACTIVATION)
        self._rotate = function("vllm_lite_rotate", _ROTATE)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        shape, steps, out_steps = x.shape, x.stride(), out.stride()
        code = _code(x, weight, out)
        rows = len(shape) == 2
        if code is None or not (rows or len(shape) == 3) or out.shape != shape or weight.shape != shape[-1:]:
            return super().rms_norm(x, weight, eps, out)
        inner, x_inner, out_inner = (1, 0, 0) if rows else (shape[1], steps[1], out_steps[1])
        self._rms_norm(
            code, shape[0], inner, shape[-1], eps,
            x.data_ptr(), steps[0], x_inner, weight.data_ptr(), out.data_ptr(), out_steps[0], out_inner,
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

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        cos, sin = rotation
        code = _code(heads, cos, sin)
        num_tokens, num_heads, head_size = heads.shape
        if code is None or not cos.shape == sin.shape == (num_tokens, head_size) or cos.stride() != sin.stride():
            return super().rotate(heads, rotation)
        self._rotate(
            code, num_tokens, num_heads, head_size, heads.data_ptr(), heads.stride(0), heads.stride(1),
            cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        )  # fmt: skip
        return None

    def activate_and_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        if kind not in _KINDS or not self._gated(_KINDS[kind], gate_up, out):
            super().activate_and_mul(kind, gate_up, out)

    def _gated(self, activation: int, gate_up: torch.Tensor, out: torch.Tensor) -> bool:
        code = _code(gate_up, out)
        if code is None or gate_up.dim() != 2 or out.dim() != 2:
            return False
        num_tokens, size = out.shape
        if gate_up.shape != (num_tokens, 2 * size):
            return False
        self._activation(
            code, activation, num_tokens, size, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0)
        )
        return True


def select_rotation(
    table: torch.Tensor,  # float32 [max_position, 2, half], contiguous
    positions: torch.Tensor,  # int64 [num_tokens], contiguous
    out: Rotation,  # both with rows of one stride
) -> bool:
    """The rows of a RotaryEmbedding's table at `positions`, in the dtype of `out`. False, and nothing is done, if the
    tensors are others than these. IndexError for a position that is not in the table.
    """
    cos, sin = out
    code = _code(cos, sin)
    if code is None or positions.dtype != torch.int64 or not positions.is_contiguous() or cos.stride() != sin.stride():
        return False
    max_position, _, half = table.shape
    bad = function("vllm_lite_select_rotation", _SELECT, int64)(
        code, len(positions), half, table.data_ptr(), max_position, positions.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), cos.stride(0),
    )  # fmt: skip
    if bad >= 0:
        raise IndexError(f"position {int(positions[bad])} is outside of the model's {max_position}")
    return True


def _code(*tensors: torch.Tensor) -> int | None:
    """The number of their common dtype; None if they have none, or if the elements of one are not contiguous."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.stride()[-1] != 1:
            return None
    return DTYPES[dtype] if dtype in FLOATS else None
