"""Meeting of a group's ranks for torch.distributed, and the end of a wait when the group has ended.

On one host they meet over a file in the private folder of the group, so no port is chosen and nothing listens for it.
Its name has the inode of the group's memory, so the file of a group that ended before can never be taken for this one.
Once all ranks have connected, rank 0 removes it. A group that spans hosts meets at a port of rank 0's.
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
        self._name = name
        self._spread = group.spread
        self._path = Path(group.folder) / f"{name}-{os.fstat(group.memory).st_ino}"

    def meet(self, end: GroupEnd, timeout_s: float) -> Store:
        """Wait until all ranks have come here. Raises RankLostError if the group ends meanwhile, or after `timeout_s`.

        The C++ that connects them cannot be interrupted, so it is not entered before all are there.
        """
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
        """Raises RankLostError if rank 0 cannot be reached."""
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
        """Remove the file, on rank 0. To be called when all ranks are connected."""
        if self._shard.rank == 0:
            self._path.unlink(missing_ok=True)


@cache
def _tcp_store(spread: Spread, rank: int, timeout_s: float) -> TCPStore:
    """The store at rank 0's address, for all that this process has to meet for. It lasts as long as the process does,
    since others may still read there when this rank is connected."""
    options: dict[str, Any] = {"master_listen_fd": os.dup(spread.listener)} if spread.listener is not None else {}
    timeout = timedelta(seconds=timeout_s)
    world = len(spread.hosts)
    return TCPStore(spread.hosts[0], spread.port, world, rank == 0, timeout, wait_for_workers=False, **options)
