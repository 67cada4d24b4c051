"""Copies cached K and V of sequences into contiguous rows: csrc/cuda/gather_kv.cuh."""

import numpy as np
import torch

from vllm_lite.kernels.cuda.attention.attention_inputs import check_indices, check_kv
from vllm_lite.kernels.cuda.launcher import Launcher, cuda_type, require

SOURCE = "gather_kv.cuh"
TOKENS = 32  # a block's
THREADS = 128


def gather_kv(  # noqa: PLR0913, PLR0917
    launcher: Launcher,
    keys: torch.Tensor,  # [total_kv_tokens, num_kv_heads, head_size], contiguous
    values: torch.Tensor,  # like keys
    kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size], any strides but the last, which is 1
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    kv_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    *,
    max_rows: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Copy the last tokens of sequence i to rows `kv_start_loc[i] : kv_start_loc[i + 1]`, as many as these are.
    `max_rows` bounds the rows of a sequence. float8 values are multiplied by their scale; other caches must have the
    dtype of `keys`."""
    head_size = keys.shape[-1]
    check_kv(kv, head_size, width=8)
    check_indices(block_tables, kv_start_loc, seq_lens)
    require(keys.dtype in (torch.float16, torch.bfloat16), f"keys is {keys.dtype}, not float16 or bfloat16")
    require(kv.dtype == keys.dtype or kv.itemsize == 1, f"kv is {kv.dtype}; it must be {keys.dtype} or a float8")
    require(head_size % 8 == 0, f"head size {head_size} is not a multiple of 8")
    for name, rows in (("keys", keys), ("values", values)):
        fits = rows.shape == (len(keys), kv.shape[2], head_size) and rows.dtype == keys.dtype
        require(fits and rows.is_contiguous(), f"{name} must be [rows, {kv.shape[2]}, {head_size}], contiguous")
    if len(seq_lens) == 0 or max_rows == 0:
        return
    kernel = launcher.kernel(SOURCE, f"gather_kv<{cuda_type(keys.dtype, 'keys')}, {cuda_type(kv.dtype, 'kv')}>")
    counts = (block_tables.stride(0), kv.shape[2], head_size, kv.shape[3])
    kernel(
        (-(-max_rows // TOKENS), len(seq_lens), 1),
        (THREADS, 1, 1),
        (
            *(keys, values, kv, block_tables, kv_start_loc, seq_lens),
            *map(np.int64, kv.stride()[:4]),
            *map(np.int32, counts),
            *map(np.float32, (k_scale, v_scale)),
        ),
    )
