"""Inputs, other than Q, of the attention kernels for the engine's cache layout, and their checks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.kernels.cuda.launcher import FLOAT8, require

MAX_GRID_YZ = 65535


class PagedKV(NamedTuple):
    """One layer's KV cache, and the part of it that each sequence of a step attends to. The query rows of sequence i,
    `query_start_loc[i] : query_start_loc[i + 1]`, are the last of its `seq_lens[i]` tokens."""

    kv: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size], any strides but the last, which is 1
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    query_start_loc: torch.Tensor | None  # int32 [num_seqs + 1]; None, for decode_attention: row i is sequence i's
    seq_lens: torch.Tensor  # int32 [num_seqs], including this step's tokens


@dataclass(frozen=True, slots=True)
class Scoring:
    """Parameters of scores: scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope * (key position -
    query's)."""

    scale: float
    soft_cap: float = 0.0  # 0: no cap
    alibi_slopes: torch.Tensor | None = None  # float32 [num_heads]
    window: int | None = None  # the query at position p sees (p - window, p]; table entries before it are not read
    k_scale: float = 1.0  # a float8 code times this is the key
    v_scale: float = 1.0
    block_sparse: BlockSparse | None = None  # for paged_attention only
    sinks: torch.Tensor | None = None  # float32 [num_heads]: logit of each head's attention sink, not scaled

    def factors(self, kv: torch.Tensor) -> tuple[float, float]:
        """Factors of q.k and V; only float8 caches have scales."""
        return (self.scale * self.k_scale, self.v_scale) if kv.itemsize == 1 else (self.scale, 1.0)

    def check(self, num_heads: int) -> None:
        scale = self.scale * self.k_scale
        require(scale > 0, f"scale * k_scale is {scale}; it must be positive")
        require(self.window is None or self.window > 0, f"a window of {self.window} tokens sees nothing")
        require(self.soft_cap >= 0, f"the soft cap is {self.soft_cap}; it is positive, or 0 for none")
        for name, numbers in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if numbers is not None:
                fits = numbers.shape == (num_heads,) and numbers.dtype == torch.float32 and numbers.is_contiguous()
                require(fits, f"{name} must be float32 [{num_heads}], contiguous")


def tensor_core_reason(dtype: torch.dtype, head_size: int, kv_dtype: torch.dtype | None = None) -> str | None:
    """None if the decode and prefill kernels support these types, else the reason, as a clause for an error message."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"attention on tensor cores takes float16 or bfloat16, not {dtype}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"head size {head_size} is not a multiple of 8 up to 256"
    if kv_dtype not in (None, dtype, *FLOAT8):
        return f"a KV cache of {kv_dtype} does not go with queries of {dtype}: it takes {dtype} or a float8"
    return None


def check_tensors(out: torch.Tensor, query: torch.Tensor, cache: PagedKV) -> None:
    """Raise ValueError unless shapes and types match and rows are dense."""
    require(query.dim() == 3, f"query has shape {list(query.shape)}, not [num_tokens, num_heads, head_size]")
    _, num_heads, head_size = query.shape
    require(out.shape == query.shape and out.dtype == query.dtype, "out must have the shape and type of query")
    check_kv(cache.kv, head_size)
    num_kv_heads = cache.kv.shape[2]
    require(num_heads % num_kv_heads == 0, f"{num_heads} heads cannot share {num_kv_heads} KV heads evenly")
    for name, rows in (("query", query), ("out", out)):
        dense = rows.stride(2) == 1 and (num_heads == 1 or rows.stride(1) == head_size)
        require(dense, f"{name} has strides {rows.stride()}; the heads of a token must be adjacent")
    check_indices(cache.block_tables, cache.query_start_loc, cache.seq_lens)


def check_for_tensor_cores(out: torch.Tensor, query: torch.Tensor, cache: PagedKV, kv_width: int = 8) -> None:
    """As `check_tensors`, for kernels that load 16 bytes of Q, and `kv_width` elements of K and V, at a time."""
    check_tensors(out, query, cache)
    if reason := tensor_core_reason(query.dtype, query.shape[2], cache.kv.dtype):
        raise ValueError(reason)
    for name, rows in (("query", query), ("out", out)):
        aligned = (len(rows) <= 1 or rows.stride(0) % 8 == 0) and rows.data_ptr() % 16 == 0
        require(aligned, f"the rows of {name} must begin at multiples of 16 bytes (stride {rows.stride(0)} elements)")
    check_kv(cache.kv, query.shape[2], kv_width)


def check_kv(kv: torch.Tensor, head_size: int, width: int = 1) -> None:
    """Raise ValueError unless the cache has the expected shape and its rows can be read `width` elements at a time."""
    shape = f"[num_blocks, 2, num_kv_heads, block_size, head_size {head_size}]"
    fits = kv.dim() == 5 and kv.shape[1] == 2 and kv.shape[4] == head_size
    require(fits, f"kv has shape {list(kv.shape)}, not {shape}")
    strides = [stride for size, stride in zip(kv.shape[:4], kv.stride(), strict=False) if size > 1]
    aligned = kv.data_ptr() % (width * kv.itemsize) == 0 and all(stride % width == 0 for stride in strides)
    require(
        kv.stride(4) == 1 and aligned,
        f"rows of kv must be dense and begin at multiples of {width} elements; its strides are {kv.stride()}",
    )


def check_indices(block_tables: torch.Tensor, start_loc: torch.Tensor | None, seq_lens: torch.Tensor) -> None:
    """Check that these are int32 [num_seqs, max_blocks], [num_seqs + 1], [num_seqs], with dense rows."""
    num_seqs = len(seq_lens)
    require(num_seqs <= MAX_GRID_YZ, f"{num_seqs} sequences are more than a launch takes: {MAX_GRID_YZ}")
    for name, tensor, shape in (
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1])),
        ("start_loc", start_loc, (num_seqs + 1,)),
        ("seq_lens", seq_lens, (num_seqs,)),
    ):
        if tensor is not None:
            dense = tensor.numel() == 0 or tensor.stride(-1) == 1
            fits = tensor.dtype == torch.int32 and tensor.shape == shape and dense
            require(
                fits, f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be int32 {list(shape)} with dense rows"
            )
