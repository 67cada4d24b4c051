"""MeetingPlace: the shared memory and private folder through which the ranks of one worker group connect.

The engine creates both. A single rank needs neither.
"""

import os

from vllm_lite.process_settings import WorkerGroup
from vllm_lite.runtime.group_memory import create_group_memory, end_group, ended_by
from vllm_lite.runtime.supervise import remove_dir


class MeetingPlace:
    """The engine's handle of a group's memory, open until close()."""

    def __init__(self, world: int, folder: str) -> None:
        """`folder` is created if there are several ranks, and removed by close(); it must not exist yet."""
        self._folder = folder
        self._memory: int | None = None
        if world > 1:
            os.mkdir(folder, 0o700)
            self._memory = create_group_memory()

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that worker processes inherit."""
        return () if self._memory is None else (self._memory,)

    def invite(self, *, in_thread: bool) -> WorkerGroup | None:
        """The settings with which one worker joins. The worker closes the descriptor in them: a process inherits its
        own, a thread of this process gets a duplicate."""
        if self._memory is None:
            return None
        return WorkerGroup(os.dup(self._memory) if in_thread else self._memory, self._folder)

    def end(self) -> None:
        """Make all ranks leave their waits for each other. May be called repeatedly."""
        if self._memory is not None:
            end_group(self._memory)

    def first_to_abort(self) -> int | None:
        """The rank that ended the group first, if it was one of them."""
        return None if self._memory is None else ended_by(self._memory)[1]

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory)
            remove_dir(self._folder)
