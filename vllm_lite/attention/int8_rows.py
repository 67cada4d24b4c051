"""Rows of an int8 KV cache: the codes of one head of one token, and behind them their scale.

A row is [head_size + 4] bytes: head_size codes in [-127, 127], then a float32 in the machine's order; an element is
code * scale, where scale is the row's largest size / 127. So whatever moves a block moves its scales, and a row depends
on its own token alone. Head sizes are multiples of 4, so scales are aligned.
"""

import torch

SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Rows of less become zeros: the kernels may take denormal numbers for zero."""


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes that a cache of type `dtype` keeps after the elements of each token and head."""
    return SCALE_BYTES if dtype == torch.int8 else 0


def quantized(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [..., head_size] as the cache keeps them: int8 [..., head_size + 4]."""
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / 127
    scales = torch.where(scales < _LEAST_SCALE, 0.0, scales)
    codes = (wide / torch.where(scales == 0, torch.inf, scales)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def dequantized(rows: torch.Tensor) -> torch.Tensor:
    """float32 [..., head_size] of what a cache keeps, int8 [..., head_size + 4]."""
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return codes.float() * scales.contiguous().view(torch.float32)
