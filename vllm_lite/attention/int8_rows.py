"""Rows of an int8 KV cache: the codes of one head of one token, followed by their scale.

A row is [head_size + 4] bytes: head_size codes in [-127, 127], then a float32 in the machine's byte order. The row's
Hadamard transform has the elements code * scale, where scale is their largest magnitude / 127. The transform spreads a
channel that is far larger than the others over all of them, so that the scale becomes smaller (QuaRot, Ashkboos et al.,
2024). It changes no product of two rows: kernels transform queries as well, and transform the weighted sum of V back.

Moving a block moves its scales too, and a row depends on its own token alone. Head sizes are multiples of 4, so scales
are aligned.
"""

import math

import torch

SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Rows with a smaller scale become zeros, because the kernels may flush denormal numbers to zero."""


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes that a cache of type `dtype` keeps after the elements of each token and head."""
    return SCALE_BYTES if dtype == torch.int8 else 0


def quantized(rows: torch.Tensor) -> torch.Tensor:
    """Quantize `rows` [..., head_size] to cache rows: int8 [..., head_size + 4]."""
    wide = hadamard(rows.float())
    scales = wide.abs().amax(-1, keepdim=True) / 127
    scales = torch.where(scales < _LEAST_SCALE, 0.0, scales)
    codes = (wide / torch.where(scales == 0, torch.inf, scales)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def dequantized(rows: torch.Tensor) -> torch.Tensor:
    """Dequantize cache rows, int8 [..., head_size + 4], to float32 [..., head_size]."""
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return hadamard(codes.float() * scales.contiguous().view(torch.float32))


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Multiply float32 `rows` [..., head_size] by an orthonormal Hadamard matrix, its own inverse, in blocks of the
    largest power of two in head_size. The order of the sums is that of the kernels, so that codes are the same."""
    block = rows.shape[-1] & -rows.shape[-1]
    half, exponent = 1, block.bit_length() - 1
    rows = rows * (math.sqrt(0.5) ** (exponent % 2) / 2 ** (exponent // 2))
    while half < block:
        low, high = rows.unflatten(-1, (-1, 2, half)).unbind(-2)
        rows = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return rows
