"""Copies of whole blocks of the paged cache."""

import torch

from vllm_lite.kernels.cpu.library import function, int64, pointer


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block `a` of `source` to block `b` of `destination` for each (a, b) of pairs: int64 [num_pairs, 2].

    Both pools are contiguous with blocks along the first axis, of one dtype, in the memory of the CPU; they may be the
    same. The pairs of one call are independent of each other: no block that is written is another pair's source or
    destination. Ids are not checked against the pools.
    """
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(f"blocks of {source.shape[1:]} {source.dtype} and {destination.shape[1:]} {destination.dtype}")
    if not (source.is_contiguous() and destination.is_contiguous() and pairs.is_contiguous()):
        raise ValueError("the pools and the pairs must be contiguous")
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must be int64 [num_pairs, 2], got {pairs.dtype} {list(pairs.shape)}")
    copy = function("vllm_lite_copy_blocks", (pointer, pointer, int64, pointer, int64))
    block_bytes = source.stride(0) * source.itemsize
    copy(source.data_ptr(), destination.data_ptr(), block_bytes, pairs.data_ptr(), len(pairs))
