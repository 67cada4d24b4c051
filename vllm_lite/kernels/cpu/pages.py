"""Memory for what is large and read all the time, in huge pages where the system has them. No torch."""

import ctypes
import mmap
from typing import NamedTuple

HUGE_PAGE_BYTES = 2 << 20


class Pages(NamedTuple):
    """Zeros, from a multiple of HUGE_PAGE_BYTES on; they take memory when they are first written."""

    mapping: mmap.mmap
    """Who keeps this, or a view of it, keeps the memory."""
    start: int
    """Offset of the pages in the mapping, in bytes."""
    address: int

    @classmethod
    def zeros(cls, num_bytes: int) -> "Pages":
        """Raises OSError where the system gives no more."""
        # The part before the first huge page is never touched, so it takes no memory.
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        start = -first % HUGE_PAGE_BYTES
        return cls(mapping, start, first + start)

    def give_back(self, start: int, num_bytes: int) -> None:
        """Give back whole pages that are not needed: neighbours may be in use."""
        first = self.start + start
        begin = first + -first % mmap.PAGESIZE
        end = (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
