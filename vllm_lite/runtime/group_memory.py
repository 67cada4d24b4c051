"""Shared memory of a worker group: created by the engine, inherited by the workers.

It is an anonymous file (memfd): it has no name by which others could find it and ends with the last process that has it
open. The first page is for control, laid out as below; vllm_lite/parallel uses the rest. The file is zero at first, and
pages are allocated when written.

    uint32 at 0    1 + the rank that ended the group first; 0 while it runs. Every waiting rank polls it.
"""

import os

CONTROL_BYTES = 4096
MAX_RANKS = 31
"""Bounded by the first page, which has 128 bytes for each rank after the control word; kMaxRanks in
csrc/cpu/rank_group.h."""
_WORD_BYTES = 4
_ENGINE = 0xFFFF_FFFF


def create_group_memory() -> int:
    """Returns an open file descriptor for spawn(); the caller closes it."""
    fd = os.memfd_create("vllm_lite_group", os.MFD_CLOEXEC)
    os.ftruncate(fd, CONTROL_BYTES)
    return fd


def end_group(fd: int, rank: int | None = None) -> None:
    """Make all ranks leave their waits, because `rank` failed or (None) the engine ends them. Only the first call
    counts."""
    if ended_by(fd) == (False, None):
        os.pwrite(fd, (_ENGINE if rank is None else 1 + rank).to_bytes(_WORD_BYTES, "little"), 0)


def ended_by(fd: int) -> tuple[bool, int | None]:
    """Whether the group has ended, and the rank that ended it; None for the engine."""
    word = int.from_bytes(os.pread(fd, _WORD_BYTES, 0), "little")
    return word != 0, None if word in (0, _ENGINE) else word - 1
