"""Memory in huge pages for weights and KV caches, its return to the system, and copies of KV blocks."""

import ctypes
import mmap
import weakref
from threading import Lock

import torch

from vllm_lite.kernels.cpu.library import function, int64, pointer
from vllm_lite.kernels.cpu.pages import HUGE_PAGE_BYTES, Pages

_MADV_DONTNEED = 4
_ALIGNMENT_BYTES = 64
_STRETCH_BYTES = 8 * HUGE_PAGE_BYTES


def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [size], aligned to 64 bytes, on huge pages where the system has them.

    With small pages one thread reads at little more than half the speed of memory, because the processor prefetches
    within a page only and translates an address for each page.
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


class _Stretch:
    """Huge pages that several weights share; each weight takes the bytes after the previous one. The pages are freed
    when none of the weights is left."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pages: weakref.ref[mmap.mmap] | None = None
        self._used_bytes = self._end_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Take zeroed bytes; num_bytes <= _STRETCH_BYTES."""
        with self._lock:
            mapping = None if self._pages is None else self._pages()
            if mapping is None or self._used_bytes + num_bytes > self._end_bytes:
                mapping, self._used_bytes, _ = pages = Pages.zeros(_STRETCH_BYTES)
                self._pages, self._end_bytes = weakref.ref(mapping), pages.start + _STRETCH_BYTES
            part = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=self._used_bytes)
            self._used_bytes += num_bytes + -num_bytes % _ALIGNMENT_BYTES
            return part


_stretch = _Stretch()


def weight_zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    """As `zeros`, for a weight. Small weights share huge pages; alone each would be on small pages.

    A step reads all weights once, so with small pages it would translate the address of nearly every page.
    """
    num_bytes = size * dtype.itemsize
    if not 0 < num_bytes <= _STRETCH_BYTES // 2:
        return zeros(size, dtype)
    return _stretch.take(num_bytes).view(dtype)


def give_back(part: torch.Tensor) -> None:
    """Free the pages of `part`, which must be a view of a mapped file that was only read.

    The system reads them from the file again when they are used. Anonymous memory would read as zeros from then on.
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
