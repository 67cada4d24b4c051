"""SharedMemoryCommunicator: ranks on one host, connected by shared memory (csrc/cpu/collectives.cpp)."""

import torch

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.kernels.cpu.collectives import DIFFERS, DONE, TAKEN, TIMED_OUT, RankGroup, Waits
from vllm_lite.parallel.communicator import OneStage
from vllm_lite.runtime.machine import num_cpus


class SharedMemoryCommunicator(OneStage):
    """A communicator over shared memory. Calls are native and can be recorded in a program; if such a program fails,
    `lost_rank` says whether a rank was the reason."""

    graph_safe = True
    shares_memory = True

    def __init__(
        self, shard: Shard, memory: int, shared_bytes: int, timeout_s: float, waits: Waits | None = None
    ) -> None:
        """`memory`: the descriptor of the group's memory, which may be closed afterwards.

        Returns when all ranks are connected. No call waits longer than `timeout_s`. Raises RankLostError if a rank ends
        or does not connect in that time.
        """
        self.shard = shard
        self._timeout_s = timeout_s
        self._group = RankGroup(
            memory, shard.rank, shard.world, timeout_s, waits or Waits.among(shard.world, num_cpus())
        )
        self._check(self._group.join(shared_bytes))

    def all_reduce(self, x: torch.Tensor) -> None:
        self._check(self._group.all_reduce(x))

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Always returns the same memory: a rank may fill its columns again only when all have read them, which callers
        must ensure (worker/sampling/ranked_sampler.py)."""
        return self._group.rows(num_rows, num_columns, dtype)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        if not self._group.holds(x) or x.shape[1] != sum(widths):
            raise ValueError(f"expected rows of {sum(widths)} columns made by `shared_rows`, got {list(x.shape)}")
        self._check(self._group.barrier())

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.shard.world, *x.shape, dtype=x.dtype)
        self._check(self._group.all_gather(x, out))
        return out

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        self._check(self._group.broadcast(x, source))

    def barrier(self) -> None:
        self._check(self._group.barrier())

    def is_waiting(self) -> bool:
        return self._group.waits_for is not None

    def abort(self) -> None:
        self._group.end()

    def lost_rank(self) -> int | None:
        """The rank that called `abort` first. If the engine ended the group or a wait took too long: the rank for which
        this one was waiting. None if this rank called `abort` first, or if no rank is lost."""
        first = self._group.ended_by
        if first is None:
            return self._group.missing
        return None if first == self.shard.rank else first

    def close(self) -> None:
        self._group.leave()

    def _check(self, status: int) -> None:
        if status != DONE:
            raise self._error(status)

    def _error(self, status: int) -> Exception:
        rank, missing, first = self.shard.rank, self._group.missing, self._group.ended_by
        if status == TAKEN:
            return RuntimeError(f"rank {rank} of the group has come already; each worker must have a rank of its own")
        if status == DIFFERS:
            return RuntimeError(f"rank {rank} made another call than other ranks; all must make the same, in one order")
        if status == TIMED_OUT:
            return RankLostError(f"rank {missing} did not come within {self._timeout_s:g} s, rank {rank} waited for it")
        if first == rank or (first is None and not self._group.has_ended):
            return RuntimeError(f"rank {rank} has left its group and can make no more calls")
        who = "the engine" if first is None else f"rank {first}"
        during = "" if missing is None else f" while it waited for rank {missing}"
        return RankLostError(f"rank {rank} cannot go on: {who} has ended the group{during}")
