"""Paged attention over cached latents (MLA), for all rows of a step: csrc/cuda/latent_attention.cuh.

The work is a list of splits, as for decode_attention: decoded rows are split by length, and a row of a prompt is one
entry, whose context is processed by one block for up to 32 heads.
"""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, check_indices
from vllm_lite.kernels.cuda.attention.attention_work import TILE, SplitList, check_list
from vllm_lite.kernels.cuda.attention.decode_attention import (
    TARGET_BLOCKS,
    Workspace,
    divide_workspace,
    to_base_2,
)
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "latent_attention.cuh"
MOST_ELEMENTS = 576
"""Maximum elements of a latent with its rotated part: with more, two tiles and the heads would exceed 100 KB of shared
memory."""
WHOLE = 1 << 30
"""`split_tokens` of rows that are not split."""
ROOMY = 128 * 1024
"""Shared memory of a multiprocessor, in bytes, with room for 32 heads."""
_WARPS, _KEYS = 4, 32


def latent_reason(
    dtype: torch.dtype, head_size: int, value_size: int, kv_dtype: torch.dtype | None = None
) -> str | None:
    """None if the kernel supports these, else the reason, as a clause for an error message."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"latent attention on tensor cores takes float16 or bfloat16, not {dtype}"
    if kv_dtype not in (None, dtype):
        return f"a cache of latents in {kv_dtype} does not go with queries of {dtype}"
    if head_size % 8 or value_size % 8 or not 8 <= value_size <= min(head_size, 512) or head_size > MOST_ELEMENTS:
        return (
            f"latents of {head_size} elements, {value_size} of them V, are not multiples of 8 up to {MOST_ELEMENTS} "
            "and 512"
        )
    return None


def row_tiles(num_heads: int, multiprocessor_bytes: int) -> int:
    """Query heads of a block / 16."""
    return 2 if num_heads > 16 and multiprocessor_bytes >= ROOMY else 1


def kernel_name(dtype: torch.dtype, head_size: int, value_size: int, tiles: int) -> str:
    return f"latent_attention<{cuda_type(dtype, 'query')}, {head_size}, {value_size}, {tiles}>"


def shared_bytes(head_size: int, tiles: int) -> int:
    """Shape::ELEMENTS of 2 bytes, and a float for each warp and row."""
    rows, pitch = 16 * tiles, -(-head_size // 32) * 32 + 8
    return 2 * ((rows + 2 * _KEYS) * pitch + rows * (_KEYS + 8)) + 4 * _WARPS * rows


def latent_attention(  # noqa: PLR0913 - what only some steps have comes last
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, value_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,  # kv: [num_blocks, 1, 1, block_size, head_size], any strides but the last, which is 1
    work: SplitList,
    scale: float,
    *,
    workspace: Workspace | None = None,  # None if no row has several splits
    split_tokens: int = 0,
) -> None:
    """Attention of the rows on the list; other rows of `out` are unchanged.

    Block table entries after a row's last token are not read. A row's bits depend only on what it attends to.
    `split_tokens` is the list's: 0, or a multiple of 16. Raises ValueError for bad input.
    """
    _check(out, query, cache)
    require(scale > 0, f"the scale is {scale}; it must be positive")
    require(
        split_tokens >= 0 and split_tokens % TILE == 0, f"a split of {split_tokens} tokens: not a multiple of {TILE}"
    )
    check_list("splits", work.splits, 4)
    most, (_, num_heads, head_size), value_size = work.most_splits, query.shape, out.shape[2]
    if most < 1:
        return
    kv, table = cache.kv, cache.block_tables
    parts = divide_workspace(workspace, most * num_heads, value_size) if work.several else (None, None, None)
    tiles = row_tiles(num_heads, launcher.multiprocessor_bytes)
    blocks = -(-num_heads // (16 * tiles))
    launcher.kernel(SOURCE, kernel_name(query.dtype, head_size, value_size, tiles))(
        (min(most, -(-TARGET_BLOCKS // blocks)), blocks, 1),
        (32 * _WARPS, 1, 1),
        (
            *(out, *parts, query, kv, table, work.splits),
            *map(np.int64, (out.stride(0), query.stride(0), table.stride(0), kv.stride(0))),
            *map(np.int32, (kv.stride(3), num_heads, kv.shape[3].bit_length() - 1, split_tokens // TILE)),
            np.float32(to_base_2(scale, 0.0)[0]),
        ),
        shared_bytes(head_size, tiles),
    )


def _check(out: torch.Tensor, query: torch.Tensor, cache: PagedKV) -> None:
    kv = cache.kv
    require(query.dim() == 3, f"query has shape {list(query.shape)}, not [num_tokens, num_heads, head_size]")
    num_tokens, num_heads, head_size = query.shape
    fits = out.dim() == 3 and out.shape[:2] == query.shape[:2] and out.dtype == query.dtype
    require(fits, f"out is {out.dtype} {list(out.shape)}; it must be {query.dtype} [{num_tokens}, {num_heads}, V]")
    if reason := latent_reason(query.dtype, head_size, out.shape[2], kv.dtype):
        raise ValueError(reason)
    shaped = kv.dim() == 5 and kv.shape[1:3] == (1, 1) and kv.shape[4] == head_size
    require(shaped, f"kv has shape {list(kv.shape)}, not [num_blocks, 1, 1, block_size, head_size {head_size}]")
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    strides = [stride for size, stride in zip(kv.shape[:4], kv.stride(), strict=False) if size > 1]
    aligned = kv.stride(4) == 1 and kv.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)
    require(aligned, f"rows of kv must be dense and begin at multiples of 8 elements; its strides are {kv.stride()}")
    require(kv.stride(3) < 1 << 31, f"the tokens of a block lie {kv.stride(3)} elements apart, more than 2^31")
    for name, rows in (("query", query), ("out", out)):
        dense = rows.stride(2) == 1 and (num_heads == 1 or rows.stride(1) == rows.shape[2])
        require(dense, f"{name} has strides {rows.stride()}; the heads of a token must be adjacent")
        aligned = (num_tokens <= 1 or rows.stride(0) % 8 == 0) and rows.data_ptr() % 16 == 0
        require(aligned, f"the rows of {name} must begin at multiples of 16 bytes (stride {rows.stride(0)} elements)")
    check_indices(cache.block_tables, cache.query_start_loc, cache.seq_lens)
