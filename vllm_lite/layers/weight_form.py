"""The forms that a weight takes when it is loaded: what multiplies by it fastest where it lies.

On a CPU that is `NativeForm` for every dtype and number of rows, and no second copy is kept. `vllm-lite bench kernels`
gave on one core of an EPYC (avx512_bf16), for 4096 x 4096 in bfloat16, microseconds of torch.mm, of oneDNN prepacked,
and of ours: 1 row 1975, 961, 906; 8 rows 2086, 1412, 983; 32 rows 3857, 3085, 2353; 512 rows 37780, 36520, 37910.
"""

from typing import Literal, Protocol

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.linear import FLOATS, PackedWeight, linear, quantize
from vllm_lite.layers import onednn

Quantization = Literal["int8"]
"""int8: one scale for each output; activations as the machine multiplies fastest (kernels/cpu/linear.py)."""


class WeightForm(Protocol):
    """A weight [out_features, in_features] with its bias [out_features], if it has one."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x W^T + bias; x: [num_rows, in_features], out: [num_rows, out_features], x's dtype or float32."""
        ...


class DenseForm:
    """As it was loaded; any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.dtype != out.dtype:
            out.copy_(torch.nn.functional.linear(x, self.weight, self.bias))
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)


class OneDnnForm:
    """Reordered by oneDNN: for a CPU without native kernels."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = packed
        self.bias = bias

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(onednn.packed_linear(x, self.packed, self.bias))


class NativeForm:
    """Packed for the kernels of csrc/cpu. A row's result does not depend on the rows beside it, bit for bit."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        linear(x, self.packed, out)


class Int8Form:
    """int8 in plain torch, on any device: saves memory, not time, as the weight is widened for every product."""

    ROWS_AT_A_TIME = 8192  # of the weight: bounds the memory of the widened part

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.parts = [quantize(part) for part in weight.split(self.ROWS_AT_A_TIME)]
        self.dtype = weight.dtype
        self.bias = bias

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        column = 0
        for integers, scales in self.parts:
            weight = (integers * scales[:, None]).to(self.dtype)
            out[:, column : column + len(integers)] = x @ weight.t()
            column += len(integers)
        if self.bias is not None:
            out += self.bias


def copies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `weight_form` only reads the weight that it is given, and keeps nothing of it."""
    return device.type == "cpu" and dtype in FLOATS and cpu.available()


def weight_form(
    weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: Quantization | None = None
) -> WeightForm:
    """The best form for `weight`: [out_features, in_features], bias: [out_features]. May keep them, or copy them."""
    if copies(weight.dtype, weight.device):
        return NativeForm(PackedWeight(weight, bias, int8=quantization == "int8"))
    if quantization == "int8":
        return Int8Form(weight, bias)
    packed = onednn.pack(weight)
    return DenseForm(weight, bias) if packed is None else OneDnnForm(packed, bias)
