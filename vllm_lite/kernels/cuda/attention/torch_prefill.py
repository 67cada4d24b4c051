"""Attention of whole prompts with torch, on the layer's K and V of the step. See prefill_table.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from vllm_lite.kernels.cuda.attention.prefill_table import LIBRARIES


class WholePrompts(NamedTuple):
    """Prompts of equal length with consecutive rows, and their way."""

    first_row: int
    num_prompts: int
    length: int
    way: str


def torch_prefill(
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # like out
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size], rows may be strided
    value: torch.Tensor,  # like key
    prompts: Sequence[WholePrompts],
    scale: float,
) -> None:
    """Causal attention within each prompt; other rows of `out` are unchanged."""
    for first, count, length, way in prompts:
        rows = slice(first, first + count * length)
        q, k, v = (part[rows].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
        with sdpa_kernel(LIBRARIES[way]):
            found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[rows].unflatten(0, (count, length)).copy_(found.transpose(1, 2))
