"""Memory for what is large and read all the time: taken in huge pages, given back, and copied by blocks of KV cache."""

import ctypes
import mmap

import torch

from vllm_lite.kernels.cpu.library import function, int64, pointer
from vllm_lite.kernels.cpu.pages import HUGE_PAGE_BYTES, Pages

_MADV_DONTNEED = 4
_ALIGNMENT_BYTES = 64


def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [size], aligned to 64 bytes, on huge pages where the system has them.

    With small pages one thread reads at little more than half the speed of memory: the processor fetches ahead within a
    page only, and looks up an address for each.
    """
    num_bytes = size * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        whole = torch.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8)
        start = -whole.data_ptr() % _ALIGNMENT_BYTES
    else:
        pages = Pages.zeros(num_bytes)
        start = pages.start
        whole = torch.frombuffer(pages.mapping, dtype=torch.uint8)  # keeps the mapping alive
    return whole[start : start + num_bytes].view(dtype)


def give_back(part: torch.Tensor) -> None:
    """Take the pages of `part`, which lies in a mapped file and was only read, out of this process's memory.

    They come back by themselves when they are read again. Anonymous memory would read as zeros from then on.
    """
    first = part.data_ptr()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    start = first + -first % mmap.PAGESIZE  # whole pages only: neighbours may be in use
    size = (first + extent * part.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if part.numel() and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


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
