"""Ranks of one worker group as threads of a test, each with its own communicator on the same memory."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.deadlines import scaled
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.process_settings import WorkerGroup
from vllm_lite.runtime.group_memory import create_group_memory

T = TypeVar("T")
Connect = Callable[[Shard, WorkerGroup], Communicator]


@contextmanager
def worker_group(folder: Path) -> Iterator[WorkerGroup]:
    memory = create_group_memory()
    try:
        yield WorkerGroup(memory, str(folder))
    finally:
        os.close(memory)


def in_threads(world: int, body: Callable[[int], T]) -> list[T]:
    """Run body(rank) for every rank at the same time. Raises the first rank's error; errors of ranks that were
    abandoned by another rank come last."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(40))  # a little longer than ranks wait for each other
    for rank in sorted(errors, key=lambda rank: (isinstance(errors[rank], RankLostError), rank)):
        raise errors[rank]
    assert len(results) == world, f"of {world} ranks only {sorted(results)} came to their end"
    return [results[rank] for rank in range(world)]


@contextmanager
def connected(connect: Connect, world: int, folder: Path) -> Iterator[list[Communicator]]:
    """The communicators of all ranks, closed afterwards."""
    with worker_group(folder) as group:
        ranks = in_threads(world, lambda rank: connect(Shard(rank, world), group))
        try:
            yield ranks
        finally:
            in_threads(world, lambda rank: ranks[rank].close())
