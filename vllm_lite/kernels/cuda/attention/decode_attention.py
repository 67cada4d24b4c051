"""Paged attention of single new tokens: csrc/cuda/decode_attention.cuh.

A row's context is divided into splits, which blocks process independently; the last block to finish adds the results up
in order (Flash-Decoding, Dao et al. 2023). The work is a list in device memory (attention_work.py): a captured launch
processes the list's content at that time, and a row's bits do not depend on the other rows of the batch.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring, check_for_tensor_cores
from vllm_lite.kernels.cuda.attention.attention_work import TILE, Cascade, SplitList, check_list
from vllm_lite.kernels.cuda.launcher import Arg, Launcher, cuda_type, require

SOURCE, CASCADE_SOURCE = "decode_attention.cuh", "cascade_attention.cuh"
LOG2E = 1.4426950408889634
_WARPS = 4
FETCH = False
"""Whether tiles are prefetched to L2. gpu_check measures both, and reports the faster one."""
TARGET_BLOCKS = 2048
"""Maximum grid size: five times the concurrent blocks of an H200, so that little is idle at the end. With more splits,
blocks process several, and a graph captured for long contexts starts no more blocks."""
CASCADE_BLOCKS = 512
"""The same for shared splits: the number of concurrent blocks, so that a graph starts few if nothing is shared."""


class Workspace(NamedTuple):
    """Workspace of a launch whose rows may have several splits. Consecutive launches may share it."""

    parts: torch.Tensor  # float32 [part_floats]
    arrived: torch.Tensor  # int32 [num_splits * num_heads], zeros before and after each launch

    @classmethod
    def on(cls, device: torch.device, num_floats: int, num_counters: int) -> "Workspace":
        return cls(
            torch.empty(num_floats, dtype=torch.float32, device=device),
            torch.zeros(num_counters, dtype=torch.int32, device=device),
        )

    @classmethod
    def for_splits(cls, device: torch.device, num_splits: int, num_heads: int, head_size: int) -> "Workspace":
        """A workspace for a list with up to `num_splits` entries."""
        return cls.on(device, part_floats(num_splits, num_heads, head_size), num_splits * num_heads)


def part_floats(num_splits: int, num_heads: int, head_size: int) -> int:
    """Floats for an output and a log-sum-exp of each split."""
    return num_splits * num_heads * (head_size + 1)


def head_tiles(group: int, head_size: int) -> int:
    """Query heads of a block / 8: all of up to 16 heads, if registers suffice."""
    return 2 if group > 8 and head_size <= 128 else 1


def most_sharing(group: int, head_size: int) -> int:
    """Number of rows of a block of cascade_attention; 1: unsupported. `group`: query heads per KV head."""
    return max(1, 8 * _cascade_tiles(head_size) // group)


def _cascade_tiles(head_size: int) -> int:
    """Columns of a block / 8."""
    return 2 if head_size <= 128 else 1


def kernel_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, group: int, block_size: int) -> str:
    small = "true" if block_size < TILE else "false"
    types = f"{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}"
    fetch = ", true" if FETCH else ""
    return f"decode_attention<{types}, {head_size}, {head_tiles(group, head_size)}, {small}, {_WARPS}{fetch}>"


def cascade_name(dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, block_size: int) -> str:
    small = "true" if block_size < TILE else "false"
    types = f"{cuda_type(dtype, 'query')}, {cuda_type(kv_dtype, 'kv')}"
    return f"cascade_attention<{types}, {head_size}, {_cascade_tiles(head_size)}, {small}, {_WARPS}>"


def decode_attention(  # noqa: PLR0913 - what only some steps have comes last
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
    cache: PagedKV,
    work: SplitList,
    scoring: Scoring,
    *,
    workspace: Workspace | None = None,  # None if no row has several splits
    split_tokens: int = 0,
) -> None:
    """Attention of the rows on the list; other rows of `out` are unchanged.

    Block table entries before a window, or after a row's last token, are not read. A row's bits depend only on what it
    attends to, whether splits are shared or not. `split_tokens` is the list's: 0, or a multiple of 16. Raises
    ValueError for bad input.
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
    parts = divide_workspace(workspace, most * num_heads, head_size) if work.several else (None, None, None)
    group = num_heads // num_kv_heads
    pairs = num_kv_heads * -(-group // (8 * (tiles := head_tiles(group, head_size))))
    scale, v_scale = scoring.factors(kv)
    read = (query, kv, kv[:, 1], block_tables)
    strides: tuple[Arg, ...] = tuple(
        map(np.int64, (query.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(2)))
    )
    sizes: tuple[Arg, ...] = tuple(map(np.int32, (kv.stride(3), num_heads, num_kv_heads, block_size.bit_length() - 1)))
    factors: tuple[Arg, ...] = tuple(map(np.float32, (*to_base_2(scale, scoring.soft_cap), v_scale)))
    split_tiles = np.int32(split_tokens // TILE)
    firsts = None
    if work.cascade is not None:
        _check_cascade(work.cascade, scoring, group, head_size)
        shared, firsts, rows = work.cascade
        args = (*parts, *read, work.splits, shared, rows, *strides, *sizes, split_tiles, *factors)
        _launch_cascade(launcher, args, query, cache, len(shared))
    launcher.kernel(SOURCE, kernel_name(query.dtype, kv.dtype, head_size, group, block_size))(
        (min(len(work.splits) - 1, -(-TARGET_BLOCKS // pairs)), pairs, 1),
        (32 * _WARPS, 1, 1),
        (
            *(out, *parts, *read, work.splits, firsts, scoring.alibi_slopes, scoring.sinks),
            *(np.int64(out.stride(0)), *strides, *sizes, np.int32(scoring.window or 0), split_tiles, *factors),
        ),
        _WARPS * 8 * tiles * (head_size + 2) * 4,
    )


def _launch_cascade(
    launcher: Launcher, args: tuple[Arg, ...], query: torch.Tensor, cache: PagedKV, most_splits: int
) -> None:
    _, _, num_kv_heads, block_size, head_size = cache.kv.shape
    launcher.kernel(CASCADE_SOURCE, cascade_name(query.dtype, cache.kv.dtype, head_size, block_size))(
        (min(most_splits, -(-CASCADE_BLOCKS // num_kv_heads)), num_kv_heads, 1),
        (32 * _WARPS, 1, 1),
        args,
        _WARPS * 8 * _cascade_tiles(head_size) * (head_size + 2) * 4,
    )


def _check_cascade(cascade: Cascade, scoring: Scoring, group: int, head_size: int) -> None:
    check_list("shared", cascade.shared, 4)
    check_list("rows", cascade.rows, 2)
    plain = scoring.window is None and scoring.alibi_slopes is None
    require(plain, "rows share splits only where there is neither a window nor ALiBi")
    require(
        most_sharing(group, head_size) > 1,
        f"a block has no room for a second row of {group} heads of {head_size}, so none can share",
    )


def to_base_2(scale: float, soft_cap: float) -> tuple[float, float]:
    """The kernels' factor of q.k and their cap: scores are exponents of 2, or, with a cap, in units of it."""
    return (scale / soft_cap, soft_cap * LOG2E) if soft_cap else (scale * LOG2E, 0.0)


def divide_workspace(workspace: Workspace | None, num_parts: int, head_size: int) -> tuple[torch.Tensor, ...]:
    """part_out, part_lse and the counters. Raises ValueError if the workspace is too small."""
    floats = num_parts * (head_size + 1)
    if workspace is None:
        raise ValueError(f"rows may have several splits, for which a workspace of {floats} floats is needed")
    for name, given, dtype, least in (
        ("parts", workspace.parts, torch.float32, floats),
        ("arrived", workspace.arrived, torch.int32, num_parts),
    ):
        fits = given.dtype == dtype and given.dim() == 1 and len(given) >= least
        shape = list(given.shape)
        require(fits, f"{name} of the workspace must be {dtype} [{least} or more], got {given.dtype} {shape}")
    parts = workspace.parts
    return parts[: num_parts * head_size], parts[num_parts * head_size : floats], workspace.arrived


def _check(out: torch.Tensor, query: torch.Tensor, cache: PagedKV) -> None:
    kv = cache.kv
    check_for_tensor_cores(out, query, cache, kv_width=8 if kv.itemsize == 2 or query.shape[-1] % 64 else 16)
    require(kv.shape[3].bit_count() == 1, f"the block size must be a power of two, got {kv.shape[3]}")
    require(kv.stride(3) < 1 << 31, f"the tokens of a block lie {kv.stride(3)} elements apart, more than 2^31")
