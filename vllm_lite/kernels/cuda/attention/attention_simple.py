"""Paged attention without tensor cores, for any type and any mixture of query lengths: csrc/cuda/attention_simple.cuh.
Used by float32 models; simple rather than fast."""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring, check_tensors
from vllm_lite.kernels.cuda.attention.decode_attention import to_base_2
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "attention_simple.cuh"
_WARPS = 4


def attention_simple(
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,
    scoring: Scoring,
) -> None:
    """Causal attention of all rows; rows of sequences of length 0 and rows after the last sequence become zero. Raises
    ValueError for invalid inputs."""
    check_tensors(out, query, cache)
    num_tokens, num_heads, head_size = query.shape
    kv, block_tables, query_start_loc, seq_lens = cache
    scoring.check(num_heads)
    require(head_size <= 256, f"head size {head_size} is above 256")
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    if num_tokens == 0 or len(seq_lens) == 0:
        out.zero_()
        return
    scale, v_scale = scoring.factors(kv)
    strides = (out.stride(0), query.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(2), kv.stride(3))
    sizes = (len(seq_lens), kv.shape[2], head_size, kv.shape[3].bit_length() - 1, scoring.window or 0)
    types = f"{cuda_type(query.dtype, 'query')}, {cuda_type(kv.dtype, 'kv')}"
    launcher.kernel(SOURCE, f"attention_simple<{types}>")(
        (num_tokens, num_heads, 1),
        (32 * _WARPS, 1, 1),
        (
            *(out, query, kv, kv[:, 1], block_tables, seq_lens, query_start_loc, scoring.alibi_slopes, scoring.sinks),
            *map(np.int64, strides),
            *map(np.int32, sizes),
            *map(np.float32, (*to_base_2(scale, scoring.soft_cap), v_scale)),
        ),
        _WARPS * (head_size + 2) * 4,
    )
