"""Rendezvous of a group's ranks for torch.distributed, and detection of the group's end during a wait.

On one host ranks meet at a file in the group's private folder, so there is no port and nothing listens. The file's name
has the inode of the group's memory, so a file of an earlier group is never used by mistake. Rank 0 removes it once all
ranks have connected. A group on several hosts meets at a port of rank 0's.
"""

import os
import time
import weakref
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.process_settings import Spread, WorkerGroup
from vllm_lite.runtime.group_memory import end_group, ended_by

LOOK_EVERY_S = 0.002
"""Interval at which a waiting rank checks whether all have arrived."""


class GroupEnd:
    """The control word of the group's memory, from the view of one rank."""

    def __init__(self, shard: Shard, memory: int) -> None:
        """`memory` is a descriptor; it is duplicated, so its owner may close it at any time."""
        self._rank = shard.rank
        self._memory = os.dup(memory)
        weakref.finalize(self, os.close, self._memory)

    def has_come(self) -> bool:
        return ended_by(self._memory)[0]

    def lost_rank(self) -> int | None:
        """The rank that ended the group; None for this rank or the engine."""
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
    """A torch.distributed store that all ranks of a group share until they are connected."""

    def __init__(self, name: str, shard: Shard, group: WorkerGroup) -> None:
        """`name` separates several rendezvous in the same folder."""
        self._shard = shard
        self._name = name
        self._spread = group.spread
        self._path = Path(group.folder) / f"{name}-{os.fstat(group.memory).st_ino}"

    def meet(self, end: GroupEnd, timeout_s: float) -> Store:
        """Wait until all ranks have arrived. Raises RankLostError if the group ends meanwhile, or after `timeout_s`.
        torch's native code that connects them cannot be interrupted, so it is called only when all are here."""
        world = self._shard.world
        store = self._store(timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
        deadline_s = time.monotonic() + timeout_s
        store.add("arrived", 1)
        while (arrived := store.add("arrived", 0)) < world:
            end.check()
            if time.monotonic() > deadline_s:
                raise RankLostError(f"{world - arrived} of {world} ranks did not come within {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        return store

    def _store(self, timeout_s: float) -> Store:
        """The file store, or rank 0's TCP store. Raises RankLostError if rank 0 cannot be reached."""
        spread = self._spread
        if spread is None:
            return FileStore(str(self._path), self._shard.world)
        try:
            store = _tcp_store(spread, self._shard.rank, timeout_s)
        except RuntimeError as error:
            where = f"{spread.hosts[0]}:{spread.port}"
            raise RankLostError(f"rank 0 cannot be reached at {where}: {error}") from error
        return PrefixStore(self._name, store)

    def remove(self) -> None:
        """Remove the file, on rank 0. Call it when all ranks are connected."""
        if self._shard.rank == 0:
            self._path.unlink(missing_ok=True)


@cache
def _tcp_store(spread: Spread, rank: int, timeout_s: float) -> TCPStore:
    """The store at rank 0's address, for every rendezvous of this process. It is kept until the process ends, as other
    ranks may still read from it when this rank is connected."""
    options: dict[str, Any] = {"master_listen_fd": os.dup(spread.listener)} if spread.listener is not None else {}
    timeout = timedelta(seconds=timeout_s)
    world = len(spread.hosts)
    return TCPStore(spread.hosts[0], spread.port, world, rank == 0, timeout, wait_for_workers=False, **options)
