"""Chunked prefill over a paged KV cache on tensor cores: csrc/cuda/prefill_attention.cuh."""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring, check_for_tensor_cores
from vllm_lite.kernels.cuda.attention.attention_work import PREFILL_ROWS, check_list
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type

SOURCE = "prefill_attention.cuh"
THREADS = 128
_NO_WINDOW = 1 << 30


ROOMY = 128 * 1024
"""Shared memory in bytes with which a multiprocessor holds more than one block with 64 keys of 128 dims: 8.0, 8.7, 9.0
and 10.0 have more; 8.6, 8.9 and 12.0 have 100 KiB."""


def keys_a_tile(head_size: int, multiprocessor_bytes: int) -> int:
    return 64 if head_size <= 64 or (head_size <= 128 and multiprocessor_bytes >= ROOMY) else 32


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, keys: int) -> str:
    return f"prefill_attention<{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}, {head_size}, {keys}>"


def shared_bytes(head_size: int, keys: int) -> int:
    """Dynamic shared memory of a block: `prefill::Shape<C, HEAD, TILE>::ELEMENTS` of 2 bytes."""
    pitch = (head_size + 15) // 16 * 16 + 8
    return (PREFILL_ROWS + 2 * keys) * pitch * 2


def prefill_attention(
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,
    tiles: torch.Tensor,  # int32 [num_tiles, 2], of attention_work.prefill_tiles
    scoring: Scoring,
) -> None:
    """Causal attention of the rows in `tiles`; other rows of `out` are unchanged.

    Block table entries outside the rows' context are not read. A row that attends to no key (seq_len 0) becomes zero. A
    row's bits depend neither on other sequences nor on how its prompt was divided into chunks, if all chunks use this
    kernel. Raises ValueError for unsupported shapes, types or strides.
    """
    check_for_tensor_cores(out, query, cache)
    _, num_heads, head_size = query.shape
    kv, block_tables, query_start_loc, seq_lens = cache
    scoring.check(num_heads)
    check_list("tiles", tiles, 2)
    if len(tiles) == 0:
        return
    scale, v_scale = scoring.factors(kv)
    _, _, num_kv_heads, block_size, _ = kv.shape
    group = num_heads // num_kv_heads
    strides = (out.stride(0), query.stride(0), *kv.stride()[:4])
    window = min(scoring.window or _NO_WINDOW, _NO_WINDOW)
    keys = keys_a_tile(head_size, launcher.multiprocessor_bytes)
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size, keys))(
        (len(tiles), num_kv_heads, 1),
        (THREADS, 1, 1),
        (
            *(out, query, kv, block_tables, query_start_loc, seq_lens, tiles, scoring.alibi_slopes, scoring.sinks),
            *map(np.int64, strides),
            *map(np.int32, (block_tables.stride(0), group, block_size, window)),
            *map(np.float32, (scale, v_scale, scoring.soft_cap)),
        ),
        shared_bytes(head_size, keys),
    )
