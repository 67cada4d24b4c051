"""Small linear layers, one for each head, computed by one call of csrc/cpu/head_linear.cpp."""

import ctypes
from collections.abc import Sequence

import torch

from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.cpu.weights.linear import PackedWeight

_TYPES = (pointer, int64, int32, pointer, int64, int64, pointer, int64, int64, int64)


class HeadLinear:
    """One packed weight for each head, all of one shape and type. Rows are not quantized, even with grouped weights;
    see csrc/cpu/linear.h."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        """Raises ValueError if shapes or types differ, or if there are no weights."""
        kinds = {(weight.num_outputs, weight.num_inputs, weight.dtype) for weight in weights}
        if len(kinds) != 1:
            raise ValueError(f"the weights of all heads must have one shape and type, got {kinds or 'none'}")
        self.weights = weights
        self.num_outputs, self.num_inputs, _ = kinds.pop()
        self._addresses = (pointer * len(weights))(*(weight.address for weight in weights))
        self._call = function("vllm_lite_head_linear", _TYPES)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[:, h] = x[:, h] W[h]^T; x: [num_tokens, num_heads, inputs], out: [num_tokens, num_heads, outputs]. Raises
        ValueError for other shapes, types or strides."""
        shapes = (len(x), len(self.weights), self.num_inputs), (len(x), len(self.weights), self.num_outputs)
        if (x.shape, out.shape) != shapes or x.dtype != out.dtype or x.dtype not in FLOATS:
            raise ValueError(
                f"{len(self.weights)} heads of {self.num_outputs} x {self.num_inputs} weights take no {x.dtype} "
                f"{list(x.shape)} -> {out.dtype} {list(out.shape)}"
            )
        if x.stride(2) != 1 or out.stride(2) != 1:
            raise ValueError(f"the elements of a head must be dense, got strides {x.stride()} and {out.stride()}")
        self._call(
            ctypes.addressof(self._addresses),
            len(self.weights),
            dtype_code(x.dtype),
            x.data_ptr(),
            *x.stride()[:2],
            out.data_ptr(),
            *out.stride()[:2],
            len(x),
        )
