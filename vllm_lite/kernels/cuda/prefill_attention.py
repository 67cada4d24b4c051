"""Chunked prefill over a paged KV cache with our own tensor-core kernel, csrc/cuda/prefill_attention.cuh."""

import numpy as np
import torch

from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "prefill_attention.cuh"
ROWS = 64  # a block's query rows: (token, head of the KV head's group) pairs
THREADS = 128
MAX_GRID_YZ = 65535
_NO_WINDOW = 1 << 30


def prefill_reason(dtype: torch.dtype, head_size: int, kv_dtype: torch.dtype | None = None) -> str | None:
    """None when the kernel can serve these, else the reason why not, as a clause for an error message."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"prefill on tensor cores takes float16 or bfloat16, not {dtype}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"head size {head_size} is not a multiple of 8 up to 256"
    if kv_dtype not in (None, dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return f"a KV cache of {kv_dtype} does not go with queries of {dtype}: it takes {dtype} or a float8"
    return None


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int) -> str:
    return f"prefill_attention<{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}, {head_size}>"


def shared_bytes(head_size: int) -> int:
    """Dynamic shared memory of a block: `prefill::Shape<HEAD>::ELEMENTS` of 2 bytes."""
    pitch = (head_size + 15) // 16 * 16 + 8
    keys = 64 if head_size <= 128 else 32
    return (ROWS + 2 * keys) * pitch * 2


def prefill_attention(  # noqa: PLR0913, PLR0917
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size], any strides but the last, which is 1
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,  # float32 [num_heads]
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    min_query_len: int = 2,
) -> None:
    """Causal attention of every sequence with at least `min_query_len` query rows; all other rows of `out` stay.

    The query rows of sequence i, `query_start_loc[i] : query_start_loc[i + 1]`, are the last of its `seq_lens[i]`
    tokens. With a window the query at position p sees (p - window, p]; table entries of blocks outside of what the rows
    see are not read. Scores are scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope * (key position -
    query position). K and V of a float8 cache count times their scale. `max_query_len` bounds the query rows of a
    sequence: rows beyond it are not computed. A row that sees no key (seq_len 0) becomes zero.

    A row's bits depend neither on the other sequences nor on how its prompt was cut into chunks, as long as all chunks
    come here (`min_query_len=1`). Raises ValueError for shapes, types or strides that the kernel does not take.
    """
    _, num_heads, head_size = query.shape
    num_seqs, block_size = len(seq_lens), kv.shape[3]
    _check_tensors(out, query, kv, (block_tables, query_start_loc, seq_lens))
    require(0 <= max_seq_len < _NO_WINDOW, f"max_seq_len is {max_seq_len}, at most {_NO_WINDOW - 1} is possible")
    require(scale > 0 and k_scale > 0, f"scale {scale} and k_scale {k_scale} must be positive")
    require(window is None or window > 0, f"a window of {window} tokens sees nothing")
    require(soft_cap >= 0, f"the soft cap is {soft_cap}; it is positive, or 0 for none")
    if alibi_slopes is not None:
        fits = alibi_slopes.shape == (num_heads,) and alibi_slopes.dtype == torch.float32
        require(fits and alibi_slopes.is_contiguous(), f"alibi_slopes must be float32 [{num_heads}], contiguous")
    if num_seqs == 0 or max_query_len < min_query_len:
        return
    k_scale, v_scale = (k_scale, v_scale) if kv.itemsize == 1 else (1.0, 1.0)
    num_kv_heads, group = kv.shape[2], num_heads // kv.shape[2]
    block_stride, value_stride, head_stride, token_stride, _ = kv.stride()
    kernel = launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size))
    strides = (out.stride(0), query.stride(0), block_stride, value_stride, head_stride, token_stride)
    counts = (block_tables.stride(0), group, block_size, min(window or _NO_WINDOW, _NO_WINDOW), min_query_len)
    kernel(
        (-(-max_query_len * group // ROWS), num_kv_heads, num_seqs),
        (THREADS, 1, 1),
        (
            *(out, query, kv, block_tables, query_start_loc, seq_lens, alibi_slopes),
            *map(np.int64, strides),
            *map(np.int32, counts),
            *map(np.float32, (scale * k_scale, v_scale, soft_cap)),
        ),
        shared_bytes(head_size),
    )


def _check_tensors(
    out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    require(query.dim() == 3, f"query has shape {list(query.shape)}, not [num_tokens, num_heads, head_size]")
    _, num_heads, head_size = query.shape
    require(out.shape == query.shape and out.dtype == query.dtype, "out must have the shape and type of query")
    check_kv(kv, head_size)
    if reason := prefill_reason(query.dtype, head_size, kv.dtype):
        raise ValueError(reason)
    require(num_heads % kv.shape[2] == 0, f"{num_heads} heads cannot share {kv.shape[2]} KV heads evenly")
    for name, rows in (("query", query), ("out", out)):
        dense = rows.stride(2) == 1 and rows.stride(1) == head_size
        require(dense, f"{name} has strides {rows.stride()}; the heads of a token must stand side by side")
        aligned = rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
        require(aligned, f"the rows of {name} must begin at multiples of 16 bytes (stride {rows.stride(0)} elements)")
    check_indices(*indices)


def check_kv(kv: torch.Tensor, head_size: int) -> None:
    """Refuse a cache that kernels which move 8 elements at a time cannot read."""
    fits = kv.dim() == 5 and kv.shape[1] == 2 and kv.shape[4] == head_size
    require(
        fits, f"kv has shape {list(kv.shape)}, not [num_blocks, 2, num_kv_heads, block_size, head_size {head_size}]"
    )
    aligned = kv.stride(4) == 1 and kv.data_ptr() % (8 * kv.itemsize) == 0
    aligned = aligned and all(
        size == 1 or stride % 8 == 0 for size, stride in zip(kv.shape, kv.stride()[:4], strict=False)
    )
    require(aligned, f"rows of kv must begin at multiples of 8 elements and be dense; its strides are {kv.stride()}")


def check_indices(block_tables: torch.Tensor, start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """int32 [num_seqs, max_blocks], [num_seqs + 1], [num_seqs], rows dense."""
    num_seqs = len(seq_lens)
    require(num_seqs <= MAX_GRID_YZ, f"{num_seqs} sequences are more than a launch takes: {MAX_GRID_YZ}")
    for name, tensor, shape in (
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1])),
        ("start_loc", start_loc, (num_seqs + 1,)),
        ("seq_lens", seq_lens, (num_seqs,)),
    ):
        fits = tensor.dtype == torch.int32 and tensor.shape == shape and (len(tensor) == 0 or tensor.stride(-1) == 1)
        require(fits, f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be int32 {list(shape)} with dense rows")
