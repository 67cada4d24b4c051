"""How the ranks of a group meet for torch.distributed, and how a waiting rank learns that the group has ended.

They meet over a file in the private folder of the group, so no port is chosen and nothing listens for it. Its name has
the inode of the group's memory, so the file of a group that ended before can never be taken for this one. Once all
ranks have connected, rank 0 removes it.
"""

import os
import time
import weakref
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.process_settings import WorkerGroup
from vllm_lite.runtime.group_memory import end_group, ended_by

LOOK_EVERY_S = 0.002
"""How often a rank that has come looks for the others."""


class GroupEnd:
    """The control word of the group's memory, as one rank sees it."""

    def __init__(self, shard: Shard, memory: int) -> None:
        """`memory` is duplicated, so its owner may close it while another thread asks."""
        self._rank = shard.rank
        self._memory = os.dup(memory)
        weakref.finalize(self, os.close, self._memory)

    def has_come(self) -> bool:
        return ended_by(self._memory)[0]

    def lost_rank(self) -> int | None:
        """The rank that ended the group, if that was another one than this."""
        rank = ended_by(self._memory)[1]
        return None if rank == self._rank else rank

    def check(self, cause: Exception | None = None) -> None:
        """Raise RankLostError if the group has ended."""
        ended, rank = ended_by(self._memory)
        if ended:
            by = "the engine" if rank is None else f"rank {rank}"
            raise RankLostError(f"{by} has ended the group that rank {self._rank} belongs to") from cause

    def abort(self) -> None:
        end_group(self._memory, self._rank)


class Rendezvous:
    """A store that all ranks of a group share until they are connected."""

    def __init__(self, name: str, shard: Shard, group: WorkerGroup) -> None:
        """`name` keeps what connects over it apart from other uses of the same folder."""
        self._shard = shard
        self._path = Path(group.folder) / f"{name}-{os.fstat(group.memory).st_ino}"

    def meet(self, end: GroupEnd, timeout_s: float) -> FileStore:
        """Wait until all ranks have come here. Raises RankLostError if the group ends meanwhile, or after `timeout_s`.

        The C++ that connects them cannot be interrupted, so it is not entered before all are there.
        """
        world = self._shard.world
        store = FileStore(str(self._path), world)
        store.set_timeout(timedelta(seconds=timeout_s))
        deadline_s = time.monotonic() + timeout_s
        store.add("arrived", 1)
        while (arrived := store.add("arrived", 0)) < world:
            end.check()
            if time.monotonic() > deadline_s:
                raise RankLostError(f"{world - arrived} of {world} ranks did not come within {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        return store

    def remove(self) -> None:
        """Remove the file, on rank 0. To be called when all ranks are connected."""
        if self._shard.rank == 0:
            self._path.unlink(missing_ok=True)
