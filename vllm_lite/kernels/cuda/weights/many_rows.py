"""Products of many rows with packed weights: torch multiplies slabs of outputs, dequantized one after another, so that
no memory for the whole weight is needed. A row's last bits may depend on the number of rows."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import ScalingType, scaled_mm

from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type
from vllm_lite.kernels.cuda.weights.packed_weight import OUTPUTS, TILE, GpuPackedWeight

SOURCE = "packed_linear.cuh"
WARPS = 8
THREADS = 32 * WARPS
SLAB_BYTES = 64 << 20
"""Memory of one slab in bytes."""
CAPABILITY = (8, 9)
"""The first capability with float8 products."""
LARGEST = 448.0
"""The largest number of E4M3."""
SMALLEST = 1e-30
"""Rows with smaller elements become zeros: their scale would not be a normal number."""


class ManyRows(Protocol):
    keeps_codes: bool
    """Whether torch multiplies the codes themselves."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out = x W^T + bias. x: [num_rows, num_inputs], float16 or bfloat16, columns in the order of the codes; bias:
        float32 [num_outputs]; out: [num_rows, num_outputs], of x's dtype or float32."""
        ...


def for_weight(launcher: Launcher, weight: GpuPackedWeight, *, float8_rows: bool) -> ManyRows:
    """float8_rows: whether the checkpoint expects float8 activations."""
    one_scale = (weight.kind, weight.less, len(weight.scales)) == ("E4M3", "NOTHING", 1)
    if float8_rows and one_scale and multiplies_float8(weight.codes.device):
        return Float8Products(launcher, weight)
    return WidenedProducts(launcher, weight)


def multiplies_float8(device: torch.device) -> bool:
    """Whether torch can multiply float8 on `device`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


class WidenedProducts:
    """Weights are dequantized to x's dtype, rounded once."""

    keeps_codes = False

    def __init__(self, launcher: Launcher, weight: GpuPackedWeight) -> None:
        self.weight = weight
        self._launcher = launcher

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        for first, columns in _slabs(self.weight, out, x.element_size() * self.weight.padded[1]):
            wide = self.widened(first, columns.shape[1], x.dtype).t()
            into = columns if out.dtype == x.dtype else columns.new_empty(columns.shape, dtype=x.dtype)
            if bias is None:
                torch.mm(x, wide, out=into)
            else:
                torch.addmm(bias[first : first + columns.shape[1]].to(x.dtype), x, wide, out=into)
            if into is not columns:
                columns.copy_(into)

    def widened(self, first: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the weights of `size` outputs from `first` on: [size, num_inputs]. `first` is a multiple of 16;
        columns are in the order of the codes."""
        weight = self.weight
        tiles, shift = -(-size // TILE), np.int32(weight.group_shift)
        wide = torch.empty(TILE * tiles, weight.padded[1], dtype=dtype, device=weight.codes.device)
        types = f"{cuda_type(dtype, 'x')}, {cuda_type(weight.scales.dtype, 'scales')}"
        name = f"widen_weights<{types}, packed::{weight.kind}, packed::{weight.less}>"
        sizes = np.int32(weight.padded[0]), np.int32(weight.num_chunks), shift, np.int32(first // TILE)
        kernel = self._launcher.kernel(SOURCE, name)
        kernel(_grid(weight, tiles), (THREADS, 1, 1), (wide, weight.codes, weight.scales, *sizes))
        return wide[:size, : weight.shape[1]]


class Float8Products:
    """Rows are quantized to float8 as well, each with its largest element at 448; torch scales the sums by both scales
    and rounds them to bfloat16. Weights are float8 (E4M3) with one scale per output."""

    keeps_codes = True

    def __init__(self, launcher: Launcher, weight: GpuPackedWeight) -> None:
        self.weight = weight
        self._launcher = launcher
        self._scales = torch.ones(-(-weight.padded[0] // TILE) * TILE, device=weight.codes.device)
        self._scales[: weight.padded[0]] = weight.scales[0, :, 0]

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        rows, scales = quantized_rows(x, self.weight.padded[1])
        by_row = ScalingType.RowWise
        for first, columns in _slabs(self.weight, out, max(self.weight.padded[1], 2 * len(x))):
            codes, size = self.codes(first, columns.shape[1]).t(), columns.shape[1]
            own = self._scales[None, first : first + codes.shape[1]]
            sums = scaled_mm(rows, codes, scales, by_row, own, by_row, output_dtype=torch.bfloat16)[:, :size]
            if bias is None:
                columns.copy_(sums)
            else:
                torch.add(sums, bias[first : first + size], out=columns)

    def codes(self, first: int, size: int) -> torch.Tensor:
        """Codes of `size` outputs from `first`, a multiple of 16, rounded up to whole tiles: float8 [outputs, padded
        inputs]."""
        weight, tiles = self.weight, -(-size // TILE)
        plain = torch.empty(TILE * tiles, weight.padded[1], dtype=torch.uint8, device=weight.codes.device)
        args = plain, weight.codes, np.int32(weight.num_chunks), np.int32(first // TILE)
        self._launcher.kernel(SOURCE, "plain_codes")(_grid(weight, tiles), (THREADS, 1, 1), args)
        return plain.view(torch.float8_e4m3fn)


def quantized_rows(x: torch.Tensor, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [num_rows, at most num_inputs] to float8 (E4M3) [num_rows, num_inputs], padded with zeros, and the
    scale of each row, float32 [num_rows, 1]."""
    rows = torch.zeros(len(x), num_inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    at_once = max(1, SLAB_BYTES // (8 * num_inputs))
    for given, own, some in zip(x.split(at_once), scales.split(at_once), rows.split(at_once), strict=True):
        wide = given.float()
        torch.div(wide.abs().amax(1, keepdim=True).clamp_(min=SMALLEST), LARGEST, out=own)
        some[:, : x.shape[1]] = wide.div_(own).clamp_(-LARGEST, LARGEST)
    return rows, scales


def _grid(weight: GpuPackedWeight, tiles: int) -> tuple[int, int, int]:
    return -(-weight.num_chunks // WARPS), tiles, 1


def _slabs(weight: GpuPackedWeight, out: torch.Tensor, output_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Slabs of columns of `out`, with the number of each one's first column: as many columns as fit with `output_bytes`
    each."""
    at_once = max(1, SLAB_BYTES // (output_bytes * OUTPUTS)) * OUTPUTS
    for first in range(0, weight.shape[0], at_once):
        yield first, out[:, first : first + at_once]
