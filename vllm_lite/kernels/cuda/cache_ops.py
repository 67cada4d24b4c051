"""Writes into the paged KV cache, and copies of its blocks, on a GPU. Kernels: csrc/cuda/cache_ops.cuh.

No function reads a tensor's values from the device, so all of them can be captured in a CUDA graph.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.kernels.cuda.fused import CudaOps, require_rotation, require_rows, threads_for, vector_width
from vllm_lite.kernels.cuda.launcher import Arg, Launcher, cuda_type, require
from vllm_lite.kernels.ops import HeadNormWeights, Rotation

SOURCE = "cache_ops.cuh"
COPY_THREADS = 256
COPY_UNITS = 4
"""Accesses per thread of copy_blocks."""
WARP_THREADS = 512
"""Threads of a block with one head per warp."""
MAX_GRID_Y = 65535


class CacheSlots(NamedTuple):
    """Slots for the K and V of a step's tokens."""

    kv: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size]; only the last axis must have stride 1
    slots: torch.Tensor  # int64 [num_tokens], block * block_size + offset; negative: not stored
    k_scale: float = 1.0
    v_scale: float = 1.0
    """A float8 cache stores K / k_scale and V / v_scale, saturated. Others have no scales."""


def reshape_and_cache(
    launcher: Launcher,
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size], rows may be strided, a row's heads stand side by side
    value: torch.Tensor,  # alike
    to: CacheSlots,
) -> None:
    """Store K and V at their slots. Raises ValueError for wrong shapes or types."""
    _require_cache(to, key, value)
    _write(launcher, "reshape_and_cache", (key, value), (), to)


def rope_and_cache(
    launcher: Launcher,
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], as key
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size], rows may be strided, a row's heads stand side by side
    value: torch.Tensor,  # as key
    rotation: Rotation,
    to: CacheSlots,
) -> None:
    """Rotate query and key in place, also with negative slots; then store key and value at their slots. The bits are
    those of `rotate` and `reshape_and_cache`. Raises ValueError for wrong shapes or types."""
    _check_turned(query, key, value, rotation, to)
    _write(launcher, "rope_and_cache", (query, key, value), rotation, to)


def norm_rope_and_cache(
    launcher: Launcher,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # query, key and value as for `rope_and_cache`
    norms: HeadNormWeights,
    rotation: Rotation,
    to: CacheSlots,
) -> None:
    """`Ops.rms_norm` of each head of query and key, then `rope_and_cache`, with the same bits. A single launch if a
    warp can hold a head with 16 bytes per lane. Raises ValueError for wrong shapes or types."""
    query, key, _ = heads
    head_size = key.shape[2]
    width = vector_width(head_size // 2, *heads, *rotation, to.kv, norms.query, norms.key)
    if width == 1 or head_size > 32 * width:
        ops = CudaOps(launcher)
        ops.rms_norm(query, norms.query, norms.eps, query)
        ops.rms_norm(key, norms.key, norms.eps, key)
        rope_and_cache(launcher, *heads, rotation, to)
        return
    for what, weight in (("the weight for query", norms.query), ("the weight for key", norms.key)):
        require_rows(what, weight, key.dtype, (head_size,))
    _check_turned(query, key, heads[2], rotation, to)
    _write(launcher, "norm_rope_and_cache", heads, rotation, to, norms)


def _check_turned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, to: CacheSlots
) -> None:
    _require_cache(to, key, value)
    _require_heads("query", query, query)
    require(
        query.dtype == key.dtype and query.shape[::2] == key.shape[::2],
        f"query must be like key but for its number of heads, got {query.dtype} {list(query.shape)} "
        f"and {key.dtype} {list(key.shape)}",
    )
    require_rotation(rotation, len(key), key.shape[2], key.dtype)


def _write(
    launcher: Launcher,
    kernel: str,
    heads: tuple[torch.Tensor, ...],  # the tensors that are rotated and stored; the last is V
    rotation: tuple[torch.Tensor, ...],  # cos and sin, or nothing
    to: CacheSlots,
    norms: HeadNormWeights | None = None,
) -> None:
    kv, key = to.kv, heads[-2]
    num_tokens, _, head_size = key.shape
    if key.numel() == 0:
        return
    length = head_size // 2 if rotation else head_size  # to rotate, a thread reads both halves of a head
    width = vector_width(length, *heads, *rotation, kv)
    name = f"{kernel}<{cuda_type(key.dtype, 'key')}, {cuda_type(kv.dtype, 'the cache')}, {width}>"
    num_heads = [rows.shape[1] for rows in heads[:-1]]
    strides = [rows.stride(0) for rows in (*heads, *rotation)] + list(kv.stride()[:4])
    weights, eps = ((), ()) if norms is None else ((norms.query, norms.key), (norms.eps,))
    args: tuple[Arg, ...] = (
        *(*heads, *weights, *rotation, kv, to.slots),
        *map(np.int32, (*num_heads, head_size, kv.shape[3])),
        *map(np.int64, strides),
        *map(np.float32, (to.k_scale, to.v_scale, *eps)),
    )
    threads = threads_for(sum(num_heads) * (length // width), 256)
    if norms is not None:
        threads = threads_for(32 * sum(num_heads), WARP_THREADS)
    launcher.kernel(SOURCE, name)((num_tokens, 1, 1), (threads, 1, 1), args)


def reshape_and_cache_x(
    launcher: Launcher,
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size], rows may be strided, a row's heads stand side by side
    value: torch.Tensor,  # alike
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,  # int64 [num_tokens], as in CacheSlots
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """`reshape_and_cache` for the cache layout of paged_attention_v1 and v2. `caches` are K, [num_blocks, num_kv_heads,
    head_size / x, block_size, x] with x = 16 bytes of elements, and V, [num_blocks, num_kv_heads, head_size,
    block_size]; blocks and heads may have the same gaps in both."""
    num_tokens, num_kv_heads, head_size = key.shape
    key_cache, value_cache = caches
    num_blocks, block_size = value_cache.shape[0], value_cache.shape[-1]
    x = 16 // key_cache.element_size()
    require(head_size % x == 0, f"the head size must be a multiple of {x}, got {head_size}")
    shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
    require_rows("key_cache", key_cache, value_cache.dtype, shape)
    require_rows("value_cache", value_cache, value_cache.dtype, (*shape[:2], head_size, block_size))
    require(
        key_cache.stride() == (*value_cache.stride()[:2], block_size * x, x, 1)
        and value_cache.stride()[2:] == (block_size, 1),
        f"the heads of a block must be contiguous and lie alike in both caches, strides {key_cache.stride()} and "
        f"{value_cache.stride()}",
    )
    require_rows("slots", slots, torch.int64, (num_tokens,))
    _require_heads("key", key, key)
    _require_heads("value", value, key)
    if key.numel() == 0:
        return
    name = f"reshape_and_cache_x<{cuda_type(key.dtype, 'key')}, {cuda_type(key_cache.dtype, 'the cache')}>"
    sizes = (np.int32(num_kv_heads), np.int32(head_size), np.int32(block_size))
    strides = map(np.int64, (key.stride(0), value.stride(0), *key_cache.stride()[:2]))
    args: tuple[Arg, ...] = (key, value, key_cache, value_cache, slots, *sizes, *strides)
    threads = threads_for(num_kv_heads * head_size, 256)
    launcher.kernel(SOURCE, name)((num_tokens, 1, 1), (threads, 1, 1), (*args, *map(np.float32, scales)))


def copy_blocks(
    launcher: Launcher,
    pool: torch.Tensor,  # [num_blocks, ...], contiguous, any type
    pairs: torch.Tensor,  # int64 [num_pairs, 2], (source, destination), on the pool's device
) -> None:
    """Copy whole blocks within `pool`. No pair may write a block that another pair reads or writes."""
    require(pool.is_contiguous(), "the pool must be contiguous")
    require(pairs.is_contiguous(), "the pairs must be contiguous")
    require_rows("pairs", pairs, torch.int64, (len(pairs), 2))
    if len(pairs) == 0 or pool.numel() == 0:
        return
    block_bytes = pool.numel() // len(pool) * pool.element_size()
    unit, unit_bytes = ("uint4", 16) if block_bytes % 16 == 0 and pool.data_ptr() % 16 == 0 else ("uint8", 1)
    units = block_bytes // unit_bytes
    chunks = min(MAX_GRID_Y, -(-units // (COPY_THREADS * COPY_UNITS)))
    kernel = launcher.kernel(SOURCE, f"copy_blocks<{unit}>")
    kernel((len(pairs), chunks, 1), (COPY_THREADS, 1, 1), (pool, pairs, np.int64(units)))


def _require_cache(to: CacheSlots, key: torch.Tensor, value: torch.Tensor) -> None:
    num_tokens, num_kv_heads, head_size = key.shape
    kv = to.kv
    if kv.dim() != 5 or kv.shape[1:3] != (2, num_kv_heads) or kv.shape[4] != head_size or kv.stride(4) != 1:
        raise ValueError(
            f"kv must be [num_blocks, 2, {num_kv_heads}, block_size, {head_size}] with contiguous rows, "
            f"got {list(kv.shape)}, strides {list(kv.stride())}"
        )
    require_rows("slots", to.slots, torch.int64, (num_tokens,))
    if kv.dtype.itemsize > 1:
        require(kv.dtype == key.dtype, f"a cache of {kv.dtype} cannot take K and V of {key.dtype}")
    _require_heads("key", key, key)
    _require_heads("value", value, key)


def _require_heads(what: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    require_rows(what, tensor, like.dtype, tuple(like.shape))
    if tensor.shape[1] != 1 and tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"the heads of a row of {what} must be adjacent, got strides {list(tensor.stride())}")
