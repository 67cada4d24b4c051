"""Paged attention of one query token per sequence, over the split cache layout: csrc/cuda/paged_attention.cuh.

`paged_attention_v1` uses one thread block per (sequence, head); `paged_attention_v2` divides long sequences into
partitions of 512 tokens and merges them (Kwon et al. 2023; Flash-Decoding, Dao et al. 2023). `paged_attention` chooses.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.kernels.cuda.attention.attention_inputs import MAX_GRID_YZ, Scoring
from vllm_lite.kernels.cuda.fused import require_rows
from vllm_lite.kernels.cuda.launcher import Arg, Launcher, cuda_type, require

SOURCE = "paged_attention.cuh"
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
PARTITION_TOKENS = 512
MAX_SHARED_BYTES = 96 * 1024  # a block may have 99 KiB on sm_86 and sm_89, the least from sm_80 on

_THREADS = 128
_WARPS = 4


@dataclass(frozen=True)
class SplitCache:
    """One layer's cache and its block tables; x = 16 / itemsize. Blocks and heads may have gaps."""

    keys: torch.Tensor  # [num_blocks, num_kv_heads, head_size / x, block_size, x]
    values: torch.Tensor  # [num_blocks, num_kv_heads, head_size, block_size]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks_per_seq]
    seq_lens: torch.Tensor  # int32 [num_seqs]; 0 gives zeros
    max_seq_len: int  # no entry of seq_lens is larger


def paged_attention(
    launcher: Launcher, out: torch.Tensor, q: torch.Tensor, cache: SplitCache, scoring: Scoring
) -> None:
    """out = attention of q over the cache, by v1 or v2. q, out: [num_seqs, num_heads, head_size]."""
    version = paged_attention_v1 if prefers_v1(cache.max_seq_len, q.shape[0] * q.shape[1]) else paged_attention_v2
    version(launcher, out, q, cache, scoring)


def prefers_v1(max_seq_len: int, num_rows: int) -> bool:
    """Whether one thread block per row (num_rows = num_seqs * num_heads) is enough to fill a GPU."""
    num_partitions = max(1, math.ceil(max_seq_len / PARTITION_TOKENS))
    return max_seq_len <= 8192 and (num_partitions == 1 or num_rows > 512)


def paged_attention_v1(
    launcher: Launcher, out: torch.Tensor, q: torch.Tensor, cache: SplitCache, scoring: Scoring
) -> None:
    """One thread block per row of q [num_seqs, num_heads, head_size]; out has the same shape."""
    types = _check(out, q, cache, scoring)
    num_seqs, num_heads, _ = q.shape
    if num_seqs == 0:
        return
    block_size = cache.values.shape[3]
    tokens = cache.max_seq_len
    if scoring.window:
        tokens = min(tokens, scoring.window + block_size)
    shared = _shared_bytes(q.shape[2], math.ceil(tokens / block_size) * block_size)
    require(
        shared <= MAX_SHARED_BYTES,
        f"paged_attention_v1 keeps a logit for each of {tokens} tokens in shared memory: {shared} bytes, "
        f"of {MAX_SHARED_BYTES}; use paged_attention_v2",
    )
    kernel = launcher.kernel(SOURCE, f"paged_attention_v1<{types}>")
    kernel((num_heads, num_seqs, 1), (_THREADS, 1, 1), [out, scoring.sinks, *_inputs(q, cache, scoring)], shared)


def paged_attention_v2(
    launcher: Launcher, out: torch.Tensor, q: torch.Tensor, cache: SplitCache, scoring: Scoring
) -> None:
    """Partitions of 512 tokens, with a thread block each, merged by a second kernel. Shapes as in v1."""
    types = _check(out, q, cache, scoring)
    num_seqs, num_heads, head_size = q.shape
    if num_seqs == 0:
        return
    num_partitions = max(1, math.ceil(cache.max_seq_len / PARTITION_TOKENS))
    require(num_partitions <= MAX_GRID_YZ, f"max_seq_len {cache.max_seq_len} makes more than {MAX_GRID_YZ} partitions")
    parts = torch.empty(num_seqs, num_heads, num_partitions, head_size, dtype=torch.float32, device=q.device)
    exp_sums = torch.empty(num_seqs, num_heads, num_partitions, dtype=torch.float32, device=q.device)
    max_logits = torch.empty_like(exp_sums)

    kernel = launcher.kernel(SOURCE, f"paged_attention_v2<{types}>")
    args: list[Arg] = [exp_sums, max_logits, parts, *_inputs(q, cache, scoring)]
    kernel((num_heads, num_seqs, num_partitions), (_THREADS, 1, 1), args, _shared_bytes(head_size, PARTITION_TOKENS))

    scalar = cuda_type(q.dtype, "q")
    reduce = launcher.kernel(SOURCE, f"paged_attention_v2_reduce<{scalar}, {head_size}>")
    args = [out, exp_sums, max_logits, parts, scoring.sinks, cache.seq_lens, np.int32(num_partitions)]
    reduce((num_heads, num_seqs, 1), (_THREADS, 1, 1), args, 4 * (_WARPS + num_partitions))


def _shared_bytes(head_size: int, tokens: int) -> int:
    """Bytes for q, scratch of the reductions, and the larger of the logits of `tokens` tokens and one vector per
    warp."""
    return 4 * (head_size + _WARPS + max(tokens, _WARPS * head_size))


def _check(out: torch.Tensor, q: torch.Tensor, cache: SplitCache, scoring: Scoring) -> str:
    """Check the inputs; returns the template arguments of v1 and v2. Raises ValueError."""
    require(q.dim() == 3, f"q must be [num_seqs, num_heads, head_size], got {list(q.shape)}")
    num_seqs, num_heads, head_size = q.shape
    require(head_size in HEAD_SIZES, f"Unsupported head size: {head_size}; supported: {HEAD_SIZES}")
    require(out.shape == q.shape and out.dtype == q.dtype, f"out must be like q, got {out.dtype} {list(out.shape)}")
    require(out.is_contiguous(), "out must be contiguous")
    require(q.stride()[1:] == (head_size, 1), f"the heads of a row of q must be contiguous, strides {q.stride()}")
    require(num_seqs <= MAX_GRID_YZ, f"{num_seqs} sequences are more than a launch takes: {MAX_GRID_YZ}")
    scalar, kv = cuda_type(q.dtype, "q"), cuda_type(cache.keys.dtype, "the cache")
    require(q.element_size() > 1, f"q is {q.dtype}; only a cache may be fp8")
    require(
        kv in (scalar, "fp8_e4m3", "fp8_e5m2"),
        f"a cache of {cache.keys.dtype} does not go with q of {q.dtype}: it must be the same type or fp8",
    )
    block_size = _check_cache(cache, head_size)
    num_kv_heads = cache.values.shape[1]
    require(num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} kv heads evenly")
    tables, lens = cache.block_tables, cache.seq_lens
    require_rows("seq_lens", lens, torch.int32, (num_seqs,))
    require_rows("block_tables", tables, torch.int32, (num_seqs, tables.shape[-1]))
    require(tables.is_contiguous(), f"block_tables must be contiguous, got strides {tables.stride()}")
    require(
        0 <= cache.max_seq_len <= tables.shape[1] * block_size,
        f"max_seq_len {cache.max_seq_len} needs more than the {tables.shape[1]} blocks of a row of block_tables",
    )
    scoring.check(num_heads)
    _check_pattern(scoring, block_size)
    return f"{scalar}, {kv}, {head_size}, {block_size}"


def _check_cache(cache: SplitCache, head_size: int) -> int:
    """Check the cache; returns its block size. Raises ValueError."""
    keys, values = cache.keys, cache.values
    x = 16 // keys.element_size()
    require(head_size % x == 0, f"head size {head_size} is not a multiple of x = {x}, 16 bytes of {keys.dtype}")
    require(
        values.dim() == 4 and values.dtype == keys.dtype and values.shape[2] == head_size,
        f"values must be {keys.dtype} [num_blocks, num_kv_heads, {head_size}, block_size], "
        f"got {values.dtype} {list(values.shape)}",
    )
    num_blocks, num_kv_heads, _, block_size = values.shape
    require(block_size in BLOCK_SIZES, f"Unsupported block size: {block_size}; supported: {BLOCK_SIZES}")
    expected = (num_blocks, num_kv_heads, head_size // x, block_size, x)
    require(keys.shape == expected, f"keys must be {list(expected)}, got {list(keys.shape)}")
    require(keys.stride()[2:] == (block_size * x, x, 1), f"a head of keys must be contiguous, strides {keys.stride()}")
    require(values.stride()[2:] == (block_size, 1), f"a head of values must be contiguous, strides {values.stride()}")
    require(
        keys.stride()[:2] == values.stride()[:2] and all(stride % x == 0 for stride in keys.stride()[:2]),
        f"keys and values must have the same strides, multiples of {x}: {keys.stride()} and {values.stride()}",
    )
    require(
        keys.data_ptr() % 16 == 0 and values.data_ptr() % 16 == 0, "keys and values must begin at multiples of 16 bytes"
    )
    return int(block_size)


def _check_pattern(scoring: Scoring, block_size: int) -> None:
    if (sparse := scoring.block_sparse) is not None:
        require(
            sparse.block_tokens > 0 and sparse.block_tokens % block_size == 0,
            f"a sparse block of {sparse.block_tokens} tokens is not a multiple of the block size {block_size}",
        )
        require(
            sparse.local_blocks >= 0 and sparse.vert_stride >= 1 and sparse.tp_rank >= 0,
            f"local_blocks and tp_rank must be at least 0, vert_stride at least 1: {sparse}",
        )


def _inputs(q: torch.Tensor, cache: SplitCache, scoring: Scoring) -> list[Arg]:
    """The common parameters of v1 and v2, in their order."""
    sparse = scoring.block_sparse or BlockSparse(local_blocks=0, vert_stride=0, block_tokens=1)
    pattern = (sparse.tp_rank, sparse.local_blocks, sparse.vert_stride, sparse.block_tokens, sparse.head_step)
    return [
        q,
        np.int64(q.stride(0)),
        cache.keys,
        cache.values,
        *map(np.int64, cache.keys.stride()[:2]),
        np.int32(cache.keys.shape[1]),
        cache.block_tables,
        np.int32(cache.block_tables.shape[1]),
        cache.seq_lens,
        scoring.alibi_slopes,
        *map(np.float32, (scoring.scale, scoring.k_scale, scoring.v_scale)),
        np.int32(scoring.window or 0),
        np.float32(scoring.soft_cap),
        *map(np.int32, pattern),
    ]
