"""Memory for weights and caches, in huge pages if the system has them. Does not import torch."""

import ctypes
import mmap
from typing import NamedTuple

HUGE_PAGE_BYTES = 2 << 20


class Pages(NamedTuple):
    """Zeroed memory that begins at a multiple of HUGE_PAGE_BYTES. A page takes physical memory when it is first
    written."""

    mapping: mmap.mmap
    """The mapping; the memory lives as long as it or a view of it."""
    start: int
    """Offset of the pages in the mapping, in bytes."""
    address: int

    @classmethod
    def zeros(cls, num_bytes: int) -> "Pages":
        """Map num_bytes. Raises OSError if the system has no memory left."""
        # The part before the first huge page is never touched, so it takes no physical memory.
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        start = -first % HUGE_PAGE_BYTES
        return cls(mapping, start, first + start)

    def give_back(self, start: int, num_bytes: int) -> None:
        """Free the whole pages within these bytes; pages that the bytes only partly cover may be in use."""
        first = self.start + start
        begin = first + -first % mmap.PAGESIZE
        end = (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
