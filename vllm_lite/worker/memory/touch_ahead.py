"""TouchAhead: allocates pages of the KV cache on a CPU before the blocks in them are first written.

The system allocates a page when it is first written. A huge page then takes 0.1 to 0.2 ms to be zeroed, and several in
a virtual machine whose host has to find the memory first; blocks of Qwen3-0.6B are as large as such a page, so a step
of 32 sequences waited for two of them on average. New blocks are allocated in the order of their ids, so the pages that
will be written next are known.
"""

import ctypes
import os
import threading
from contextlib import suppress

import torch

from vllm_lite.kernels.cpu import memory
from vllm_lite.kernels.cpu.pages import HUGE_PAGE_BYTES

AHEAD_BYTES = 1 << 27
"""Bytes allocated beyond the highest block in use: a busy machine's tokens of a second, allocated in 0.3 s. Twice the
largest step's if that is more."""
PIECE_BYTES = 8 * HUGE_PAGE_BYTES
NICENESS = 10
"""Niceness of the thread that allocates pages, so that kernels go first."""
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; it changes no byte, even of pages written at the same time


class TouchAhead:
    """Allocates the pages of one pool, on a thread that ends when enough are allocated."""

    def __init__(self, pool: torch.Tensor, ahead_bytes: int = AHEAD_BYTES) -> None:
        """`pool`: contiguous, in this process's memory; one row is a block."""
        self.pool = pool
        self._ahead_bytes = ahead_bytes
        self.block_bytes = pool[0].nbytes if len(pool) else 0
        self._made_bytes = 0 if pool.nbytes >= HUGE_PAGE_BYTES else pool.nbytes
        """Bytes allocated, from the beginning of the pool; all of it for a pool smaller than a huge page."""
        self._used_bytes = 0
        """Bytes up to the highest block used so far."""
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        """The latest thread."""

    def expect(self, step_bytes: int) -> None:
        """Record the bytes of new blocks that the largest step fills. Twice as much is allocated ahead: the thread
        starts when a quarter of it is used, and has the time of a step or two to allocate pages that are needed next.
        In a virtual machine, beside compute threads, it may need all of it."""
        self._ahead_bytes = max(self._ahead_bytes, 2 * step_bytes)

    def use(self, block_id: int) -> None:
        """Record that blocks up to `block_id` are in use, and start a thread if pages are missing. Does not wait."""
        used_bytes = (block_id + 1) * self.block_bytes
        self._used_bytes = max(self._used_bytes, used_bytes)
        if self._made_bytes - used_bytes > self._ahead_bytes * 3 // 4 or self._made_bytes >= self.pool.nbytes:
            return
        if self.thread is not None and self.thread.is_alive():
            return
        self.thread = threading.Thread(target=self._run, name="touch-ahead", daemon=True)
        self.thread.start()

    def make(self, num_bytes: int) -> None:
        """Allocate the pages of the next `num_bytes` bytes on the caller's thread, within the first three quarters of
        the pool, because they will be filled at once. Then also allocate as much ahead as `use` does, so that this does
        not run beside the step that reads them."""
        goal_bytes = self._used_bytes + num_bytes + self._ahead_bytes
        self._make(min(goal_bytes, self.pool.nbytes * 3 // 4))

    def _make(self, goal_bytes: int) -> None:
        while self._made_bytes < goal_bytes:
            with self._lock:
                end = min(self._made_bytes + PIECE_BYTES, self.pool.nbytes)
                if not populate(self.pool.data_ptr() + self._made_bytes, end - self._made_bytes):
                    end = self.pool.nbytes  # an older system, or no memory: pages are allocated when written
                self._made_bytes = end

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        # Blocks may be used meanwhile: beside compute threads this takes as long as a step.
        while self._made_bytes < (goal_bytes := min(self._used_bytes + self._ahead_bytes, self.pool.nbytes)):
            self._make(goal_bytes)


def take_pages(num_blocks: int | None, block_bytes: int) -> TouchAhead | None:
    """Reserve memory for blocks, so that its pages can be allocated before the cache is created. None: the size is not
    known, or too large; then allocating the cache reports it."""
    try:
        pool = memory.zeros((num_blocks or 0) * block_bytes, torch.uint8)
    except (OSError, MemoryError, RuntimeError):
        return None
    return TouchAhead(pool.view(-1, block_bytes)) if len(pool) else None


def populate(address: int, num_bytes: int) -> bool:
    """Allocate the pages of this memory; the first and the last may extend beyond it."""
    if not hasattr(os, "sched_getaffinity"):  # another system than Linux, with other numbers
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = address // page * page, -(-(address + num_bytes) // page) * page
    madvise = ctypes.CDLL(None).madvise
    return int(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)) == 0
