"""The interface between ranks: what a step of a tensor-parallel model needs, and no more.

Calls are among the ranks of one stage, but for `send` and `receive`, which go from stage to stage. All ranks of a stage
make the same calls in the same order. A call returns when this rank may go on; on a GPU, when the work has
been put on torch's current stream. A rank that cannot go on calls `abort`; the others then leave their calls, and every
later one, with RankLostError.
"""

from typing import Protocol

import torch

from vllm_lite.checkpoint.shard import SINGLE, Shard


class Communicator(Protocol):
    """One rank's connection to the others."""

    shard: Shard
    graph_safe: bool
    """Whether graphs of the device may hold calls of it: recorded native calls on a CPU, CUDA graphs on a GPU."""
    shares_memory: bool
    """Whether what `shared_rows` returns is one memory for all ranks."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """x becomes the sum of all ranks' x, in place. x: contiguous rows [n, size], the same on all ranks.

        On a CPU the sum is made in float32 in the order of the ranks and rounded once, so that all ranks get the same
        bits, the same in every run.
        """
        ...

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for `gather_columns`: [num_rows, num_columns]. The next call may return the same memory again."""
        ...

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        """Complete x [n, sum of widths], made by `shared_rows`, of which rank r has filled widths[r] columns behind
        those of the ranks before it. Afterwards every rank sees all of x; where memory is shared, nothing is copied."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[world, *x.shape]: every rank's x, which is small, contiguous and in the memory of the CPU."""
        ...

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        """x becomes what it is on rank `source`, in place. It is contiguous and in the memory of the CPU."""
        ...

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Send x, contiguous, to the rank of the same number in another stage, which makes the call `receive`."""
        ...

    def receive(self, x: torch.Tensor, stage: int) -> None:
        """x, contiguous, becomes what the rank of the same number in that stage has sent."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        ...

    def is_waiting(self) -> bool:
        """Whether this rank waits for another one. Asked by the thread of the heartbeat."""
        ...

    def abort(self) -> None:
        """Make the other ranks leave their calls. May be called from another thread, and again."""
        ...

    def lost_rank(self) -> int | None:
        """The rank whose `abort` came first, if that was another one than this."""
        ...

    def close(self) -> None: ...


class OneStage:
    """The part of a communicator whose ranks are one stage, which has nobody to send to."""

    def send(self, x: torch.Tensor, stage: int) -> None:
        raise RuntimeError(f"nothing of {list(x.shape)} can be sent to stage {stage}: there is one stage")

    def receive(self, x: torch.Tensor, stage: int) -> None:
        raise RuntimeError(f"nothing of {list(x.shape)} can come from stage {stage}: there is one stage")


class SingleRank(OneStage):
    """The communicator of a model that one rank holds: there is nothing to exchange."""

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
