"""Paged attention without tensor cores, for any type and any mixture of query lengths: csrc/cuda/attention_simple.cuh.

What float32 models run with; correct before fast.
"""

import numpy as np
import torch

from vllm_lite.kernels.cuda.decode_attention import check_scoring, to_base_2
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "attention_simple.cuh"
_WARPS = 4


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    return f"attention_simple<{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}>"


def attention_simple(  # noqa: PLR0913, PLR0917
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size], any strides but the last, which is 1
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,  # float32 [num_heads]
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Causal attention of all rows; those of sequences of length 0 and those after the last sequence become zero.

    Meaning and order of the options are those of `decode_attention`. Raises ValueError for what does not fit.
    """
    num_tokens, num_heads, head_size = query.shape
    num_seqs = len(seq_lens)
    k_scale, v_scale = (k_scale, v_scale) if kv.itemsize == 1 else (1.0, 1.0)
    check_scoring(scale * k_scale, window, soft_cap, alibi_slopes, num_heads)
    require(out.shape == query.shape and out.dtype == query.dtype, "out must have the shape and type of query")
    fits = kv.dim() == 5 and kv.shape[1] == 2 and kv.shape[4] == head_size and kv.stride(4) == 1
    require(fits, f"kv has shape {list(kv.shape)}, strides {kv.stride()}; heads are of {head_size}")
    require(num_heads % kv.shape[2] == 0, f"{num_heads} heads cannot share {kv.shape[2]} KV heads evenly")
    require(head_size <= 256, f"head size {head_size} is above 256")
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    for rows in (query, out):
        require(rows.stride()[1:] == (head_size, 1), "the heads of a token must stand side by side")
    for tensor, shape in ((query_start_loc, (num_seqs + 1,)), (seq_lens, (num_seqs,))):
        require(tensor.dtype == torch.int32 and tensor.shape == shape, f"expected int32 {shape}, got {tensor.shape}")
    require(block_tables.dtype == torch.int32 and len(block_tables) == num_seqs, "block_tables must be int32")
    if num_tokens == 0 or num_seqs == 0:
        out.zero_()
        return
    strides = (out.stride(0), query.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(2), kv.stride(3))
    sizes = (num_seqs, kv.shape[2], head_size, kv.shape[3].bit_length() - 1, window or 0)
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype))(
        (num_tokens, num_heads, 1),
        (32 * _WARPS, 1, 1),
        (
            *(out, query, kv, kv[:, 1], block_tables, seq_lens, query_start_loc, alibi_slopes),
            *map(np.int64, strides),
            *map(np.int32, sizes),
            *map(np.float32, to_base_2(scale * k_scale, soft_cap)),
            np.float32(v_scale),
        ),
        _WARPS * (head_size + 2) * 4,
    )
