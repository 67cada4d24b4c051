"""Pages of the KV cache on a CPU are made before the blocks in them are first written.

Memory that a process asked for exists once it is written. A huge page takes 0.1 to 0.2 ms then, for its zeros, and
several in a virtual machine whose host has to find the memory first; the blocks of Qwen3-0.6B are as large as such a
page, so a step of 32 sequences waited for two of them on the average. New blocks are handed out in the order of their
ids, so what will be written next is known.
"""

import ctypes
import os
import threading
from contextlib import suppress

import torch

from vllm_lite.kernels.cpu import memory
from vllm_lite.kernels.cpu.pages import HUGE_PAGE_BYTES

AHEAD_BYTES = 1 << 27
"""What exists beyond the highest block in use: a second's tokens of a busy machine, made in 0.3 s."""
PIECE_BYTES = 8 * HUGE_PAGE_BYTES
NICENESS = 10
"""The thread that makes pages takes what the kernels leave."""
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; it changes no byte, also of pages that others write meanwhile


class TouchAhead:
    """Makes the pages of one pool, on a thread that ends when enough of them exist."""

    def __init__(self, pool: torch.Tensor, ahead_bytes: int = AHEAD_BYTES) -> None:
        """`pool`: contiguous, in this process's memory; one row is a block."""
        self.pool = pool
        self._ahead_bytes = ahead_bytes
        self.block_bytes = pool[0].nbytes if len(pool) else 0
        self._made_bytes = 0 if pool.nbytes >= HUGE_PAGE_BYTES else pool.nbytes
        """From the beginning of the pool on; all of it when there is nothing to do."""
        self._used_bytes = 0
        """Up to the highest block that was ever in use."""
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        """The last one that was started."""

    def use(self, block_id: int) -> None:
        """Say that blocks up to `block_id` are in use. It does not wait for anything."""
        used_bytes = (block_id + 1) * self.block_bytes
        self._used_bytes = max(self._used_bytes, used_bytes)
        if self._made_bytes - used_bytes > self._ahead_bytes // 2 or self._made_bytes >= self.pool.nbytes:
            return
        if self.thread is not None and self.thread.is_alive():
            return
        goal_bytes = min(used_bytes + self._ahead_bytes, self.pool.nbytes)
        self.thread = threading.Thread(target=self._run, args=(goal_bytes,), name="touch-ahead", daemon=True)
        self.thread.start()

    def make(self, num_bytes: int) -> None:
        """Make so many bytes of pages behind those in use on the caller's thread, in three quarters of the pool at
        most: something is to fill them at once. Then make those ahead as well, lest they are made beside the step that
        reads what was filled."""
        goal_bytes = self._used_bytes + num_bytes + self._ahead_bytes
        self._make(min(goal_bytes, self.pool.nbytes * 3 // 4))

    def _make(self, goal_bytes: int) -> None:
        while self._made_bytes < goal_bytes:
            with self._lock:
                end = min(self._made_bytes + PIECE_BYTES, self.pool.nbytes)
                if not populate(self.pool.data_ptr() + self._made_bytes, end - self._made_bytes):
                    end = self.pool.nbytes  # an older system, or no memory: pages come when they are written, as ever
                self._made_bytes = end

    def _run(self, goal_bytes: int) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._make(goal_bytes)


def take_pages(num_blocks: int | None, block_bytes: int) -> TouchAhead | None:
    """Take memory for blocks whose pages can be made before all else is known of the cache. None: it is not known how
    much, or there is not so much; who takes it later says so."""
    try:
        pool = memory.zeros((num_blocks or 0) * block_bytes, torch.uint8)
    except (OSError, MemoryError, RuntimeError):
        return None
    return TouchAhead(pool.view(-1, block_bytes)) if len(pool) else None


def populate(address: int, num_bytes: int) -> bool:
    """Make the pages that lie in this memory, of which the first and the last may reach beyond it."""
    if not hasattr(os, "sched_getaffinity"):  # another system than Linux, with other numbers
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = address // page * page, -(-(address + num_bytes) // page) * page
    madvise = ctypes.CDLL(None).madvise
    return int(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)) == 0
