"""Weights in memory, each with its matrix product; `make_matmul` chooses the fastest for the device.

On a CPU that is `NativeMatmul` for every dtype and number of rows, and no second copy is kept; `python benchmarks
kernels --parts linear` compares it with torch.mm and with oneDNN's packed weights.
"""

from functools import cache
from typing import Protocol

import torch

from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.weights.file_packer import Packed
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.kernels.grouped import GroupedWeight, dequantize, quantize
from vllm_lite.layers.weights import gpu_matmul, onednn
from vllm_lite.runtime import log

logger = log.get(__name__)


class Matmul(Protocol):
    """The product with a weight [out_features, in_features], and its bias [out_features] if it has one."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x W^T + bias; x: [num_rows, in_features], out: [num_rows, out_features], x's dtype or float32."""
        ...


class DenseMatmul:
    """A product with an unquantized weight; any device."""

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


class OneDnnMatmul:
    """The weight reordered by oneDNN: for a CPU without native kernels."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = packed
        self.bias = bias

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(onednn.packed_linear(x, self.packed, self.bias))


class NativeMatmul:
    """The weight packed for the kernels of csrc/cpu. A row's bits do not depend on the other rows."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        linear(x, self.packed, out)


class Int8Matmul:
    """The weight as int8 in plain torch, on a device without kernels. It saves memory, not time: each product widens
    the weight."""

    ROWS_AT_A_TIME = 8192  # of the weight: bounds the memory of the widened part

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.parts = [quantize(part, "int8") for part in weight.split(self.ROWS_AT_A_TIME)]
        self.dtype = weight.dtype
        self.bias = bias

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        column = 0
        for part in self.parts:
            weight = dequantize(part).to(self.dtype)
            out[:, column : column + len(weight)] = x @ weight.t()
            column += len(weight)
        if self.bias is not None:
            out += self.bias


class SideBySide:
    """Several weights of the same inputs, each with its number of outputs, which are concatenated."""

    def __init__(self, parts: tuple[tuple[Matmul, int], ...]) -> None:
        self.parts = parts

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for matmul, num_outputs in self.parts:
            matmul.forward(x, out.narrow(1, first, num_outputs))
            first += num_outputs


def keep_rows(matmul: Matmul) -> Matmul:
    """Set a product with a quantized weight not to round its rows, if it would; returns it."""
    if isinstance(matmul, NativeMatmul):
        matmul.packed.keep_rows()
    elif isinstance(matmul, SideBySide):
        for part, _ in matmul.parts:
            keep_rows(part)
    return matmul


def copies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `make_matmul` copies the given weight, so that its memory may be reused."""
    return device.type == "cpu" and dtype in FLOATS and cpu.available()


def packs(dtype: torch.dtype, device: torch.device, quantization: Form | None) -> str | None:
    """Name of the type to which `make_matmul` packs a weight; None if it does not pack."""
    if not copies(dtype, device):
        return None
    return quantization or str(dtype).removeprefix("torch.")


def form_for_many_rows(form: Form | None, dtype: torch.dtype, device: torch.device) -> Form | None:
    """Form of weights that are always multiplied with many rows, where text has `form`. With VNNI alone products of
    int8 in larger groups are faster: 32 inputs take as long to scale as a third of their multiplications. For few rows
    the weights' memory counts, and smaller groups are more accurate."""
    if form == "int8" and copies(dtype, device) and cpu.isa() == "avx512_bf16":
        return "int8_g128"
    return form


def make_matmul(
    weight: torch.Tensor | Packed, bias: torch.Tensor | None = None, quantization: Form | None = None
) -> Matmul:
    """Make the fastest product with `weight`: [out_features, in_features], bias: [out_features]. May keep or copy them.
    A weight that is already packed has the type that `packs` names."""
    if isinstance(weight, Packed):
        return NativeMatmul(PackedWeight(weight, bias))
    if quantization is not None and (packed := gpu_matmul.quantized_matmul(weight, bias, quantization)) is not None:
        return packed
    if copies(weight.dtype, weight.device):
        return NativeMatmul(PackedWeight(weight, bias, form=quantization))
    if quantization == "int8":
        return Int8Matmul(weight, bias)
    if quantization is not None:
        return make_grouped_matmul(quantize(weight, quantization), bias, weight.dtype, weight.device)
    reordered = onednn.pack(weight)
    return DenseMatmul(weight, bias) if reordered is None else OneDnnMatmul(reordered, bias)


def make_grouped_matmul(
    weight: GroupedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    float8_rows: bool = False,
) -> Matmul:
    """Make the fastest product with a quantized weight on rows of `dtype`, which `float8_rows` allows to round to
    float8. A weight that no kernel can multiply becomes dense."""
    if copies(dtype, device) and PackedWeight.takes(weight):
        return NativeMatmul(PackedWeight(weight, bias))
    if (packed := gpu_matmul.packed_matmul(weight, bias, dtype, device, float8_rows=float8_rows)) is not None:
        return packed
    what = f"weights of {weight.bits} bits in groups of {weight.group_size}"
    say_dense(what, device.type, str(dtype).removeprefix("torch."))
    return make_matmul(dequantize(weight).to(device, dtype), bias)


@cache
def say_dense(what: str, device: str, dtype: str) -> None:
    """Log once per kind of weights that they become dense."""
    logger.info("%s become %s: %s has no kernel for them", what, dtype, device)
