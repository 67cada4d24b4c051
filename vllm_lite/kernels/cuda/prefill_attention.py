"""Chunked prefill over a paged KV cache with our own tensor-core kernel, csrc/cuda/prefill_attention.cuh."""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention_inputs import PagedKV, Scoring, check_for_tensor_cores
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "prefill_attention.cuh"
ROWS = 64  # a block's query rows: (token, head of the KV head's group) pairs
THREADS = 128
_NO_WINDOW = 1 << 30


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int) -> str:
    return f"prefill_attention<{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}, {head_size}>"


def shared_bytes(head_size: int) -> int:
    """Dynamic shared memory of a block: `prefill::Shape<HEAD>::ELEMENTS` of 2 bytes."""
    pitch = (head_size + 15) // 16 * 16 + 8
    keys = 64 if head_size <= 128 else 32
    return (ROWS + 2 * keys) * pitch * 2


def prefill_attention(  # noqa: PLR0913
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,
    scoring: Scoring,
    *,
    max_query_len: int,
    max_seq_len: int,
    min_query_len: int = 2,
) -> None:
    """Causal attention of every sequence with at least `min_query_len` query rows; all other rows of `out` stay.

    Table entries of blocks outside of what the rows see are not read. `max_query_len` bounds the query rows of a
    sequence: rows beyond it are not computed. A row that sees no key (seq_len 0) becomes zero.

    A row's bits depend neither on the other sequences nor on how its prompt was cut into chunks, as long as all chunks
    come here (`min_query_len=1`). Raises ValueError for shapes, types or strides that the kernel does not take.
    """
    check_for_tensor_cores(out, query, cache)
    _, num_heads, head_size = query.shape
    kv, block_tables, query_start_loc, seq_lens = cache
    scoring.check(num_heads)
    require(0 <= max_seq_len < _NO_WINDOW, f"max_seq_len is {max_seq_len}, at most {_NO_WINDOW - 1} is possible")
    if len(seq_lens) == 0 or max_query_len < min_query_len:
        return
    scale, v_scale = scoring.factors(kv)
    _, _, num_kv_heads, block_size, _ = kv.shape
    group = num_heads // num_kv_heads
    strides = (out.stride(0), query.stride(0), *kv.stride()[:4])
    window = min(scoring.window or _NO_WINDOW, _NO_WINDOW)
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size))(
        (-(-max_query_len * group // ROWS), num_kv_heads, len(seq_lens)),
        (THREADS, 1, 1),
        (
            *(out, query, kv, block_tables, query_start_loc, seq_lens, scoring.alibi_slopes, scoring.sinks),
            *map(np.int64, strides),
            *map(np.int32, (block_tables.stride(0), group, block_size, window, min_query_len)),
            *map(np.float32, (scale, v_scale, scoring.soft_cap)),
        ),
        shared_bytes(head_size),
    )
