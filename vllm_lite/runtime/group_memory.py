"""The memory that the ranks of a worker group have in common: made by the engine, inherited by the workers.

It is an anonymous file (memfd): it has no name that others could find or that could be left behind, and it is gone with
the last process that has it open. Its first page is for control and has the layout below; what follows belongs to
vllm_lite/parallel. Files of its kind start as zeros and grow as they are written to.

    uint32 at 0    1 + the rank that ended the group first; 0 while nobody has. Every rank that waits looks at it.
"""

import os

CONTROL_BYTES = 4096
MAX_RANKS = 31
"""The first page has 128 bytes for each rank, behind those of the word; kMaxRanks in csrc/cpu/rank_group.h."""
_WORD_BYTES = 4
_ENGINE = 0xFFFF_FFFF


def create_group_memory() -> int:
    """Returns an open file descriptor, to be given to spawn(); the caller closes it."""
    fd = os.memfd_create("vllm_lite_group", os.MFD_CLOEXEC)
    os.ftruncate(fd, CONTROL_BYTES)
    return fd


def end_group(fd: int, rank: int | None = None) -> None:
    """Make all ranks leave their waits: `rank` cannot go on; None: the engine ends them. The first call counts."""
    if ended_by(fd) == (False, None):
        os.pwrite(fd, (_ENGINE if rank is None else 1 + rank).to_bytes(_WORD_BYTES, "little"), 0)


def ended_by(fd: int) -> tuple[bool, int | None]:
    """Whether the group has ended, and the rank that ended it; None if that was the engine."""
    word = int.from_bytes(os.pread(fd, _WORD_BYTES, 0), "little")
    return word != 0, None if word in (0, _ENGINE) else word - 1
