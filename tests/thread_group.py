"""Ranks as threads of this process, which exchange plain tensors: the communicator for tests of sharded models."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from tests.deadlines import scaled
from tests.ranks import in_threads
from vllm_lite.checkpoint.shard import Shard, Stage
from vllm_lite.errors import RankLostError

T = TypeVar("T")


class Mail:
    """Tensors that are sent from stage to stage, in order."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
        self.is_lost = threading.Event()
        """Set when a stage has ended too early."""

    def box(self, rank: int, source: int, target: int) -> "queue.Queue[torch.Tensor]":
        """The queue of tensors from rank `rank` of stage `source` to the same rank of stage `target`."""
        return self._boxes.setdefault((rank, source, target), queue.Queue())

    def take(self, rank: int, source: int, target: int, limit_s: float) -> torch.Tensor:
        deadline_s = time.monotonic() + limit_s
        while not self.is_lost.is_set() and time.monotonic() < deadline_s:
            with suppress(queue.Empty):
                return self.box(rank, source, target).get(timeout=0.05)
        raise RankLostError(f"nothing came from stage {source}")


class ThreadCommunicator:
    """See vllm_lite.parallel.communicator.Communicator. It counts its calls by name."""

    graph_safe = False

    def __init__(self, shard: Shard, group: "ThreadGroup", device: torch.device) -> None:
        self.shard = shard
        self.shares_memory = group.shares_memory
        self.num_calls: dict[str, int] = {}
        self._group = group
        self._device = device
        self._waits = False

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.dim() != 2 or not x.is_contiguous():
            raise ValueError(f"rows must be contiguous, got {list(x.shape)} with strides {x.stride()}")
        total = torch.zeros(x.shape, dtype=torch.float32)
        for part in self._exchange("all_reduce", x):
            total += part
        x.copy_(total)

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.shares_memory:
            return torch.empty(num_rows, num_columns, dtype=dtype)
        return self._group.memory(num_rows, num_columns, dtype)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        if sum(widths) != x.shape[1] or len(widths) != self.shard.world:
            raise ValueError(f"{widths} are not the columns of {self.shard.world} ranks in {list(x.shape)}")
        if self.shares_memory:
            self.barrier()
            return
        whole = self._exchange("gather_columns", x)
        torch.cat([columns[rank] for rank, columns in enumerate(part.split(widths, 1) for part in whole)], 1, out=x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("all_gather", x))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        x.copy_(self._exchange("broadcast", x)[source])

    def send(self, x: torch.Tensor, stage: int) -> None:
        self._count("send")
        self._group.mail.box(self.shard.rank, self.shard.stage.index, stage).put(x.clone())

    def receive(self, x: torch.Tensor, stage: int) -> None:
        self._count("receive")
        sent = self._group.mail.take(self.shard.rank, stage, self.shard.stage.index, self._group.limit_s)
        if (sent.shape, sent.dtype) != (x.shape, x.dtype):
            raise RuntimeError(f"{list(sent.shape)} {sent.dtype} was sent, {list(x.shape)} {x.dtype} was to come")
        x.copy_(sent)

    def barrier(self) -> None:
        self._exchange("barrier", torch.empty(0))

    def is_waiting(self) -> bool:
        return self._waits

    def abort(self) -> None:
        self._group.abort(self.shard.rank)

    def lost_rank(self) -> int | None:
        return None if self._group.lost == self.shard.rank else self._group.lost

    def close(self) -> None:
        pass

    def _count(self, name: str) -> None:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1

    def _exchange(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        """A copy of every rank's x."""
        self._count(name)
        self._waits = True
        try:
            parts = self._group.exchange(self.shard.rank, name, x.clone())
        finally:
            self._waits = False
        if len({(kind, len(part), part.dtype) for kind, part in parts}) != 1:
            raise RuntimeError(f"the ranks made different calls: {[(kind, part.shape) for kind, part in parts]}")
        return [part for _, part in parts]


class ThreadGroup:
    """Makes the communicators of `world` ranks, and runs one function on all of them at once."""

    def __init__(
        self,
        world: int,
        *,
        shares_memory: bool = True,
        expert_parallel: bool = False,
        stage: Stage = Stage(),  # noqa: B008  # it does not change
        mail: Mail | None = None,
    ) -> None:
        """`mail`: shared by all stages, if the ranks are one stage of several."""
        self.shares_memory = shares_memory
        self.limit_s = scaled(30)
        self.lost: int | None = None
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(world)
        self._slots: list[tuple[str, torch.Tensor]] = [("", torch.empty(0))] * world
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self.communicators = [
            ThreadCommunicator(Shard(rank, world, expert_parallel, stage), self, torch.device("cpu"))
            for rank in range(world)
        ]
        self.mail = mail or Mail()

    def run(self, work: Callable[[ThreadCommunicator], T]) -> list[T]:
        """Run `work` on each rank. If one raises an exception, the others end, and it is raised here."""

        def one(rank: int) -> T:
            try:
                return work(self.communicators[rank])
            except BaseException:
                self.abort(rank)
                raise

        return in_threads(len(self.communicators), one)

    def exchange(self, rank: int, name: str, x: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """Send `x` to all ranks. Returns the tensors of all ranks, in order."""
        self._slots[rank] = (name, x)
        self._wait()
        parts = list(self._slots)
        self._wait()  # no rank sends its next tensor before all have these
        return parts

    def memory(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of shared memory that grows; all ranks ask for the same shape at the same time."""
        with self._lock:
            held, wanted = self._memory.get(dtype), num_rows * num_columns
            if held is None or held.numel() < wanted:
                self._memory[dtype] = held = torch.empty(wanted, dtype=dtype)
        return held[:wanted].view(num_rows, num_columns)

    def abort(self, rank: int) -> None:
        with self._lock:
            if self.lost is None:
                self.lost = rank
        self._barrier.abort()
        self.mail.is_lost.set()

    def _wait(self) -> None:
        try:
            self._barrier.wait(self.limit_s)
        except threading.BrokenBarrierError:
            raise RankLostError(f"rank {self.lost} has ended the group, or one did not come") from None


def on_ranks(world: int, work: Callable[[ThreadCommunicator], Any], **options: Any) -> list[Any]:
    """Run `work` on each rank of a new group."""
    return ThreadGroup(world, **options).run(work)


def on_stages(num_stages: int, world: int, work: Callable[[ThreadCommunicator], T]) -> list[T]:
    """Run `work` on each rank of several stages of `world` ranks, stage by stage."""
    mail = Mail()
    groups = [ThreadGroup(world, stage=Stage(index, num_stages), mail=mail) for index in range(num_stages)]
    return [result for results in in_threads(num_stages, lambda index: groups[index].run(work)) for result in results]
