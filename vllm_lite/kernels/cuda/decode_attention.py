"""Paged attention of one new token per sequence with the engine's own kernel: csrc/cuda/decode_attention.cuh.

A sequence is cut into splits of a fixed number of tokens, which blocks attend to independently and `merge_splits` adds
up in order (Flash-Decoding, Dao et al. 2023), so that no bit of a row depends on the batch around it. Grids depend on
nothing but shapes and `max_seq_len`: a captured launch serves any lengths up to it.
"""

import numpy as np
import torch

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
_MAX_GRID_YZ = 65535


def decode_reason(dtype: torch.dtype, head_size: int, kv_dtype: torch.dtype | None = None) -> str | None:
    """None when the kernel can serve these, else the reason why not, as a clause for an error message."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"decode on tensor cores takes float16 or bfloat16, not {dtype}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"head size {head_size} is not a multiple of 8 up to 256"
    if kv_dtype not in (None, dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return f"a KV cache of {kv_dtype} does not go with queries of {dtype}: it takes {dtype} or a float8"
    return None


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


def merge_name(dtype: torch.dtype, head_size: int) -> str:
    return f"merge_splits<{cuda_type(dtype, 'out')}, {head_size}>"


def decode_attention(  # noqa: PLR0913, PLR0917
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size], any strides but the last, which is 1
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    seq_lens: torch.Tensor,  # int32 [num_seqs], this step's token included
    workspace: torch.Tensor | None,  # float32, at least `workspace_floats`; None where that is 0
    *,
    scale: float,
    max_seq_len: int,
    query_start_loc: torch.Tensor | None = None,  # int32 [num_seqs + 1]; None: row i is sequence i's
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,  # float32 [num_heads]
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    split_tokens: int = SPLIT_TOKENS,
) -> None:
    """Attention of every sequence with exactly one query row; rows of those with more stay as they are in `out`.

    Rows of sequences of length 0 and rows after the last sequence become zero. With a window only the last `window`
    tokens are seen; table entries of blocks before it or past the length are not read. Scores: scale * k_scale * q.k,
    then soft_cap * tanh(score / soft_cap), then + slope * (key position - query position). A row's bits depend on its
    sequence and on `split_tokens` (a multiple of 16) alone. No length may exceed `max_seq_len`. ValueError: bad input.
    """
    _check_rows(out, query, kv)
    _check_indices(block_tables, seq_lens, query_start_loc)
    k_scale, v_scale = (k_scale, v_scale) if kv.itemsize == 1 else (1.0, 1.0)
    check_scoring(scale * k_scale, window, soft_cap, alibi_slopes, query.shape[1])
    require(
        split_tokens > 0 and split_tokens % TILE == 0, f"a split of {split_tokens} tokens: not a multiple of {TILE}"
    )
    (num_tokens, num_heads, head_size), num_seqs = query.shape, len(seq_lens)
    _, _, num_kv_heads, block_size, _ = kv.shape
    if num_seqs == 0:
        out.zero_()
        return
    max_splits = num_splits(max_seq_len, window, split_tokens)
    parts = _divide(workspace, num_seqs * num_heads * max_splits, head_size, max_splits)
    group = num_heads // num_kv_heads
    pairs = num_kv_heads * -(-group // (8 * (tiles := head_tiles(group, head_size))))
    cut = (np.int32(window or 0), np.int32(split_tokens // TILE))
    strides = (out.stride(0), query.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(2))
    sizes = (kv.stride(3), num_tokens, num_heads, num_kv_heads, block_size.bit_length() - 1, max_splits)
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size, group, block_size))(
        (pairs, num_seqs, _blocks_a_sequence(pairs * num_seqs, max_splits)),
        (32 * _WARPS, 1, 1),
        (
            *(out, *parts, query, kv, kv[:, 1], block_tables, seq_lens, query_start_loc, alibi_slopes),
            *map(np.int64, strides),
            *(*map(np.int32, sizes), *cut),
            *map(np.float32, (*to_base_2(scale * k_scale, soft_cap), v_scale)),
        ),
        _WARPS * 8 * tiles * (head_size + 2) * 4,
    )
    if max_splits > 1:
        merge = launcher.kernel(MERGE_SOURCE, merge_name(out.dtype, head_size))
        args = (out, *parts, seq_lens, query_start_loc, np.int64(out.stride(0)), np.int32(max_splits), *cut)
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


# ---- checks


def check_scoring(
    scale: float, window: int | None, soft_cap: float, alibi_slopes: torch.Tensor | None, num_heads: int
) -> None:
    require(scale > 0, f"scale * k_scale is {scale}; it must be positive")
    require(window is None or window > 0, f"a window of {window} tokens sees nothing")
    require(soft_cap >= 0, f"the soft cap is {soft_cap}; it is positive, or 0 for none")
    if alibi_slopes is not None:
        fits = alibi_slopes.shape == (num_heads,) and alibi_slopes.dtype == torch.float32
        require(fits and alibi_slopes.is_contiguous(), f"alibi_slopes must be float32 [{num_heads}], contiguous")


def _check_rows(out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor) -> None:
    require(query.dim() == 3, f"query has shape {list(query.shape)}, not [num_tokens, num_heads, head_size]")
    num_tokens, num_heads, head_size = query.shape
    require(out.shape == query.shape and out.dtype == query.dtype, "out must have the shape and type of query")
    fits = kv.dim() == 5 and kv.shape[1] == 2 and kv.shape[4] == head_size
    require(
        fits, f"kv has shape {list(kv.shape)}, not [num_blocks, 2, num_kv_heads, block_size, head_size {head_size}]"
    )
    if reason := decode_reason(query.dtype, head_size, kv.dtype):
        raise ValueError(reason)
    require(num_heads % kv.shape[2] == 0, f"{num_heads} heads cannot share {kv.shape[2]} KV heads evenly")
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    for name, rows in (("query", query), ("out", out)):
        dense = rows.stride(2) == 1 and (num_heads == 1 or rows.stride(1) == head_size)
        require(dense, f"{name} has strides {rows.stride()}; the heads of a token must stand side by side")
        aligned = (num_tokens <= 1 or rows.stride(0) % 8 == 0) and rows.data_ptr() % 16 == 0
        require(aligned, f"the rows of {name} must begin at multiples of 16 bytes (stride {rows.stride(0)} elements)")
    step = 8 if kv.itemsize == 2 or head_size % 64 else 16  # elements of the widest access
    strides = [stride for size, stride in zip(kv.shape, kv.stride(), strict=True) if size > 1]
    aligned = (
        kv.stride(4) == 1 and kv.data_ptr() % (step * kv.itemsize) == 0 and all(s % step == 0 for s in strides[:-1])
    )
    require(
        aligned, f"rows of kv must be dense and begin at multiples of {step} elements; its strides are {kv.stride()}"
    )
    require(kv.stride(3) < 1 << 31, f"the tokens of a block lie {kv.stride(3)} elements apart, more than 2^31")


def _check_indices(block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None) -> None:
    num_seqs = len(seq_lens)
    require(num_seqs <= _MAX_GRID_YZ, f"{num_seqs} sequences are more than a launch takes: {_MAX_GRID_YZ}")
    for name, tensor, shape in (
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1])),
        ("seq_lens", seq_lens, (num_seqs,)),
        ("query_start_loc", query_start_loc, (num_seqs + 1,)),
    ):
        if tensor is None:
            continue
        fits = tensor.dtype == torch.int32 and tensor.shape == shape and (tensor.numel() == 0 or tensor.stride(-1) == 1)
        require(fits, f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be int32 {list(shape)} with dense rows")
