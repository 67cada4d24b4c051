"""Paged attention of one new token per sequence with the engine's own kernel: csrc/cuda/decode_attention.cuh.

A sequence is cut into splits of a fixed number of tokens, which blocks attend to independently and `merge_splits` adds
up in order (Flash-Decoding, Dao et al. 2023), so that no bit of a row depends on the batch around it. Grids depend on
nothing but shapes and `max_seq_len`: a captured launch serves any lengths up to it.
"""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention_inputs import PagedKV, Scoring, check_for_tensor_cores
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "decode_attention.cuh"
MERGE_SOURCE = "merge_splits.cuh"
TILE = 16
"""Tokens that a warp takes at once; a split is a multiple of it."""
SPLIT_TOKENS = 512
LOG2E = 1.4426950408889634
_WARPS = 4
TARGET_BLOCKS = 2048
"""Five times what an H200 holds at once, so that the last ones to finish leave little of it idle."""
_SPLITS_PER_BLOCK = 8


def num_splits(max_seq_len: int, window: int | None = None, split_tokens: int = SPLIT_TOKENS) -> int:
    """The most splits that a sequence of up to `max_seq_len` tokens is cut into; what is before a window is not cut."""
    tiles = -(-max_seq_len // TILE)
    if window is not None:
        tiles = min(tiles, (window + 2 * TILE - 2) // TILE)  # a window may begin and end inside of a tile
    return max(1, -(-tiles * TILE // split_tokens))


def workspace_floats(num_seqs: int, num_heads: int, head_size: int, max_splits: int) -> int:
    """Size of the scratch that a launch needs: an output and a log-sum-exp per split. 0 where one is enough."""
    return 0 if max_splits == 1 else num_seqs * num_heads * max_splits * (head_size + 1)


def head_tiles(group: int, head_size: int) -> int:
    """Query heads of a block, in eights: all of up to 16 where registers suffice."""
    return 2 if group > 8 and head_size <= 128 else 1


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, group: int, block_size: int) -> str:
    small = "true" if block_size < TILE else "false"
    types = f"{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}"
    return f"decode_attention<{types}, {head_size}, {head_tiles(group, head_size)}, {small}, {_WARPS}>"


def decode_attention(  # noqa: PLR0913
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,
    workspace: torch.Tensor | None,  # float32, at least `workspace_floats`; None where that is 0
    scoring: Scoring,
    *,
    max_seq_len: int,
    split_tokens: int = SPLIT_TOKENS,
) -> None:
    """Attention of every sequence with exactly one query row; rows of those with more stay as they are in `out`.

    Rows of sequences of length 0 and rows after the last sequence become zero. Table entries of blocks before a window
    or past the length are not read. A row's bits depend on its sequence and on `split_tokens` (a multiple of 16) alone.
    No length may exceed `max_seq_len`. Raises ValueError for bad input.
    """
    _check(out, query, cache)
    kv, block_tables, query_start_loc, seq_lens = cache
    (num_tokens, num_heads, head_size), num_seqs = query.shape, len(seq_lens)
    scoring.check(num_heads)
    require(
        split_tokens > 0 and split_tokens % TILE == 0, f"a split of {split_tokens} tokens: not a multiple of {TILE}"
    )
    if num_seqs == 0:
        out.zero_()
        return
    _, _, num_kv_heads, block_size, _ = kv.shape
    max_splits = num_splits(max_seq_len, scoring.window, split_tokens)
    parts = _divide(workspace, num_seqs * num_heads * max_splits, head_size, max_splits)
    group = num_heads // num_kv_heads
    pairs = num_kv_heads * -(-group // (8 * (tiles := head_tiles(group, head_size))))
    scale, v_scale = scoring.factors(kv)
    cut = (np.int32(scoring.window or 0), np.int32(split_tokens // TILE))
    strides = (out.stride(0), query.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(2))
    sizes = (kv.stride(3), num_tokens, num_heads, num_kv_heads, block_size.bit_length() - 1, max_splits)
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size, group, block_size))(
        (pairs, num_seqs, _blocks_a_sequence(pairs * num_seqs, max_splits)),
        (32 * _WARPS, 1, 1),
        (
            *(out, *parts, query, kv, kv[:, 1], block_tables, seq_lens, query_start_loc),
            *(scoring.alibi_slopes, scoring.sinks),
            *map(np.int64, strides),
            *(*map(np.int32, sizes), *cut),
            *map(np.float32, (*to_base_2(scale, scoring.soft_cap), v_scale)),
        ),
        _WARPS * 8 * tiles * (head_size + 2) * 4,
    )
    if max_splits > 1:
        merge = launcher.kernel(MERGE_SOURCE, f"merge_splits<{cuda_type(out.dtype, 'out')}, {head_size}>")
        ends = (np.int64(out.stride(0)), np.int32(max_splits), *cut)
        args = (out, *parts, seq_lens, query_start_loc, scoring.sinks, *ends)
        merge((num_heads, num_seqs, 1), (-(-head_size // 64) * 32, 1, 1), args)


def _blocks_a_sequence(others: int, max_splits: int) -> int:
    """How many blocks share the splits of a sequence: it changes who computes them, not what. `others`: the rest of the
    grid. Few enough that a graph made for long sequences does not start thousands of blocks which find nothing to do.
    """
    return min(max_splits, max(-(-TARGET_BLOCKS // others), -(-max_splits // _SPLITS_PER_BLOCK)))


def to_base_2(scale: float, soft_cap: float) -> tuple[float, float]:
    """What the kernels multiply q.k with and their cap: scores as exponents of 2, or before a cap in units of it."""
    return (scale / soft_cap, soft_cap * LOG2E) if soft_cap else (scale * LOG2E, 0.0)


def _divide(
    workspace: torch.Tensor | None, num_parts: int, head_size: int, max_splits: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """part_out and part_lse; None where no sequence has more than one split."""
    if max_splits == 1:
        return None, None
    floats = num_parts * (head_size + 1)
    if workspace is None or workspace.dtype != torch.float32 or workspace.dim() != 1 or len(workspace) < floats:
        raise ValueError(f"the workspace must be float32 [{floats} or more], got {getattr(workspace, 'shape', None)}")
    return workspace[: num_parts * head_size], workspace[num_parts * head_size : floats]


def _check(out: torch.Tensor, query: torch.Tensor, cache: PagedKV) -> None:
    kv = cache.kv
    check_for_tensor_cores(out, query, cache, kv_width=8 if kv.itemsize == 2 or query.shape[-1] % 64 else 16)
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    require(kv.stride(3) < 1 << 31, f"the tokens of a block lie {kv.stride(3)} elements apart, more than 2^31")
