"""Paged attention of single new tokens with the engine's own kernel: csrc/cuda/decode_attention.cuh.

What a row sees is cut into splits, which blocks attend to independently and `merge_splits` adds up in order
(Flash-Decoding, Dao et al. 2023). The work is a list in the device's memory (attention_work.py): a captured launch
serves whatever the list holds by then, and no bit of a row depends on the batch around it.
"""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention_inputs import MAX_GRID_YZ, PagedKV, Scoring, check_for_tensor_cores
from vllm_lite.kernels.cuda.attention_work import TILE, RowLists, check_list
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "decode_attention.cuh"
MERGE_SOURCE = "merge_splits.cuh"
LOG2E = 1.4426950408889634
_WARPS = 4
TARGET_BLOCKS = 2048
"""Five times what an H200 holds at once, so that the last ones to finish leave little of it idle. Where there are more
splits, blocks take several in turn, and a graph that is made for long contexts starts no more."""


def workspace_floats(num_splits: int, num_heads: int, head_size: int) -> int:
    """Size of the scratch that a launch with merges needs: an output and a log-sum-exp of each split on its list."""
    return num_splits * num_heads * (head_size + 1)


def head_tiles(group: int, head_size: int) -> int:
    """Query heads of a block, in eights: all of up to 16 where registers suffice."""
    return 2 if group > 8 and head_size <= 128 else 1


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, group: int, block_size: int) -> str:
    small = "true" if block_size < TILE else "false"
    types = f"{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}"
    return f"decode_attention<{types}, {head_size}, {head_tiles(group, head_size)}, {small}, {_WARPS}>"


def decode_attention(  # noqa: PLR0913 - what only some steps have comes last
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,
    work: RowLists,
    scoring: Scoring,
    *,
    workspace: torch.Tensor | None = None,  # float32, at least `workspace_floats`; None without merges
    split_tokens: int = 0,
) -> None:
    """Attention of the rows on the list; all others stay as they are in `out`.

    Table entries of blocks before a window or past what a row sees are not read. A row's bits depend on what it sees
    alone. `split_tokens` is that of the list: 0, or a multiple of 16. Raises ValueError for bad input.
    """
    _check(out, query, cache)
    kv, block_tables = cache.kv, cache.block_tables
    (_, num_heads, head_size), most = query.shape, work.most_splits
    scoring.check(num_heads)
    require(
        split_tokens >= 0 and split_tokens % TILE == 0, f"a split of {split_tokens} tokens: not a multiple of {TILE}"
    )
    check_list("splits", work.splits, 4)
    if most < 1:
        return
    _, _, num_kv_heads, block_size, _ = kv.shape
    parts = _divide(workspace, most * num_heads, head_size) if work.merges is not None else (None, None)
    group = num_heads // num_kv_heads
    pairs = num_kv_heads * -(-group // (8 * (tiles := head_tiles(group, head_size))))
    scale, v_scale = scoring.factors(kv)
    strides = (out.stride(0), query.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(2))
    sizes = (kv.stride(3), num_heads, num_kv_heads, block_size.bit_length() - 1, scoring.window or 0)
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size, group, block_size))(
        (min(most, -(-TARGET_BLOCKS // pairs)), pairs, 1),
        (32 * _WARPS, 1, 1),
        (
            *(out, *parts, query, kv, kv[:, 1], block_tables, work.splits, scoring.alibi_slopes, scoring.sinks),
            *map(np.int64, strides),
            *map(np.int32, (*sizes, split_tokens // TILE)),
            *map(np.float32, (*to_base_2(scale, scoring.soft_cap), v_scale)),
        ),
        _WARPS * 8 * tiles * (head_size + 2) * 4,
    )
    if work.merges is not None and len(work.merges) > 1:
        check_list("merges", work.merges, 4)
        merge = launcher.kernel(MERGE_SOURCE, f"merge_splits<{cuda_type(out.dtype, 'out')}, {head_size}>")
        grid = (num_heads, min(len(work.merges) - 1, MAX_GRID_YZ), 1)
        args = (out, *parts, work.merges, scoring.sinks, np.int64(out.stride(0)))
        merge(grid, (-(-head_size // 64) * 32, 1, 1), args)


def to_base_2(scale: float, soft_cap: float) -> tuple[float, float]:
    """What the kernels multiply q.k with and their cap: scores as exponents of 2, or before a cap in units of it."""
    return (scale / soft_cap, soft_cap * LOG2E) if soft_cap else (scale * LOG2E, 0.0)


def _divide(workspace: torch.Tensor | None, num_parts: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """part_out and part_lse."""
    floats = num_parts * (head_size + 1)
    if workspace is None or workspace.dtype != torch.float32 or workspace.dim() != 1 or len(workspace) < floats:
        raise ValueError(f"the workspace must be float32 [{floats} or more], got {getattr(workspace, 'shape', None)}")
    return workspace[: num_parts * head_size], workspace[num_parts * head_size : floats]


def _check(out: torch.Tensor, query: torch.Tensor, cache: PagedKV) -> None:
    kv = cache.kv
    check_for_tensor_cores(out, query, cache, kv_width=8 if kv.itemsize == 2 or query.shape[-1] % 64 else 16)
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    require(kv.stride(3) < 1 << 31, f"the tokens of a block lie {kv.stride(3)} elements apart, more than 2^31")
