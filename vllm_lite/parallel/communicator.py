"""Communicator: the collective calls that a step of a tensor-parallel model needs.

Calls are among the ranks of one stage, except `send` and `receive`, which go from stage to stage. All ranks of a stage
make the same calls in the same order. A call returns when this rank may continue; on a GPU, when the work is on torch's
current stream. A rank that fails calls `abort`; the others then leave their current call, and all later ones, with
RankLostError.
"""

from typing import Protocol

import torch

from vllm_lite.checkpoint.shard import SINGLE, Shard


class Communicator(Protocol):
    """A rank's connection to the other ranks."""

    shard: Shard
    graph_safe: bool
    """Whether calls can be part of graphs: recorded native calls on a CPU, CUDA graphs on a GPU."""
    shares_memory: bool
    """Whether all ranks share the memory that `shared_rows` returns."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum x over all ranks, in place. x: contiguous rows [n, size], of the same shape on all ranks.

        On a CPU the sum is computed in float32 in the order of ranks and rounded once, so its bits are the same on all
        ranks and in every run.
        """
        ...

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for `gather_columns`: [num_rows, num_columns]. The next call may return the same memory."""
        ...

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        """Complete x [n, sum of widths], made by `shared_rows`: rank r has filled widths[r] columns, after those of the
        ranks before. Afterwards every rank has all of x; shared memory needs no copy."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [world, *x.shape]: every rank's x, which is small, contiguous and in CPU memory."""
        ...

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        """Copy x from rank `source` to all ranks, in place. x is contiguous and in CPU memory."""
        ...

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Send x, contiguous, to the rank of the same number in `stage`, which calls `receive`."""
        ...

    def receive(self, x: torch.Tensor, stage: int) -> None:
        """Receive x, contiguous, from the rank of the same number in `stage`, in place."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        ...

    def is_waiting(self) -> bool:
        """Whether this rank is waiting for another one. Called by the heartbeat thread."""
        ...

    def abort(self) -> None:
        """Make the other ranks leave their calls. May be called from another thread, and repeatedly."""
        ...

    def lost_rank(self) -> int | None:
        """The rank that called `abort` first; None for this rank."""
        ...

    def close(self) -> None: ...


class OneStage:
    """Base class of communicators with a single stage, which has no other stage to send to."""

    def send(self, x: torch.Tensor, stage: int) -> None:
        raise RuntimeError(f"nothing of {list(x.shape)} can be sent to stage {stage}: there is one stage")

    def receive(self, x: torch.Tensor, stage: int) -> None:
        raise RuntimeError(f"nothing of {list(x.shape)} can come from stage {stage}: there is one stage")


class SingleRank(OneStage):
    """The communicator of a model on a single rank: nothing is exchanged."""

    shard = SINGLE
    graph_safe = True
    shares_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, num_columns, dtype=dtype, device=self._device)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        pass

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        pass

    def barrier(self) -> None:
        pass

    def is_waiting(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    def lost_rank(self) -> int | None:
        return None

    def close(self) -> None:
        pass
