"""DoRA: adapters that give the rows of an adapted weight new lengths m. The product is with m / |W + B A| (W + B A).

The lengths |W + B A| are computed once, when an adapter is read, in float32 and from the values that the product uses:
for a quantized weight, the dequantized ones.
"""

import torch

from vllm_lite.kernels.cpu.weights.lora import Lengths
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul, NativeMatmul, SideBySide

ROWS = 1024
"""Rows converted to float32 at a time."""


def can_read(weight: Matmul | None) -> bool:
    """Whether `weight_rows` can read such a weight."""
    if isinstance(weight, SideBySide):
        return all(can_read(part) for part, _ in weight.parts)
    return isinstance(weight, NativeMatmul | DenseMatmul)


def weight_rows(weight: Matmul, first: int, last: int) -> torch.Tensor:
    """The rows [first, last) of a weight, as float32 [last - first, inputs]."""
    if isinstance(weight, DenseMatmul):
        return weight.weight[first:last].to(torch.float32, copy=True)
    if isinstance(weight, NativeMatmul):
        packed = weight.packed
        dtype = torch.float32 if torch.float32 in packed.row_types else packed.dtype
        found = torch.empty(last - first, packed.num_inputs, dtype=dtype)
        packed.rows(torch.arange(first, last), found)
        return found.float()
    if not isinstance(weight, SideBySide):
        raise TypeError(f"{type(weight).__name__} has no rows that can be read; can_read says so before")
    parts, start = [], 0
    for part, size in weight.parts:
        low, high = max(first - start, 0), min(last - start, size)
        if low < high:
            parts.append(weight_rows(part, low, high))
        start += size
    return torch.cat(parts)


def adapted_lengths(weight: Matmul, first: int, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Lengths of the rows of W + B A from `first` on; up: B [rows, rank], scaled, down: A [rank, inputs], float32."""
    found = []
    for start in range(0, len(up), ROWS):
        part = up[start : start + ROWS]
        rows = weight_rows(weight, first + start, first + start + len(part))
        found.append(rows.addmm_(part, down).norm(dim=1))
    return torch.cat(found)


def lengths_of(gain: torch.Tensor, bias: torch.Tensor | None) -> Lengths:
    """Lengths with these float32 factors of the outputs, which do not apply to the bias."""
    return Lengths(gain, torch.zeros_like(gain) if bias is None else (1 - gain) * bias.float())
