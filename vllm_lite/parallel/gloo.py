"""GlooCommunicator: ranks connected by gloo, over TCP on the loopback interface or between hosts. Reference and
fallback of the others.

Every call is an exchange of bytes on the CPU, and sums are computed here: in float32, in the order of ranks, rounded
once. gloo's own reductions choose the order by size and number of ranks, so their bits would differ from those of
shared memory. So each rank receives the x of all other ranks, world - 1 times its bytes.

A GPU's tensors are copied to the CPU and back, so several ranks can share one GPU, which NCCL refuses. As a copy waits
for the device, graphs cannot contain calls.
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import Work

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import RankLostError
from vllm_lite.parallel.communicator import OneStage
from vllm_lite.parallel.process_group import LOOPBACK, ProcessGroup, gloo_group, own_part, place_parts
from vllm_lite.parallel.rendezvous import GroupEnd, Rendezvous
from vllm_lite.process_settings import WorkerGroup

LOOK_EVERY = timedelta(milliseconds=50)
"""Interval at which a waiting rank checks whether the group has ended: gloo cannot cancel a call."""
CLOSE_S = 2.0
HALVES = (torch.bfloat16, torch.float16)


class GlooCommunicator(OneStage):
    """A communicator over gloo. Several ranks may be threads of one process."""

    graph_safe = False
    shares_memory = False

    def __init__(self, shard: Shard, group: WorkerGroup, device: torch.device, timeout_s: float) -> None:
        """Returns when all ranks are connected. `timeout_s` bounds this wait and each later one. Raises RankLostError
        if a rank ends or does not connect."""
        self.shard = shard
        self._device = device
        self._timeout_s = timeout_s
        self._waiting = False
        self._end = GroupEnd(shard, group.memory)
        self._groups: list[ProcessGroup] = []
        self._disconnect = weakref.finalize(self, _disconnect, self._groups)
        self._disconnect.atexit = False  # no thread can be started at exit
        rendezvous = Rendezvous("gloo", shard, group)
        try:
            address = LOOPBACK if group.spread is None else group.spread.hosts[shard.rank]
            self._groups.append(gloo_group(rendezvous.meet(self._end, timeout_s), shard, timeout_s, address))
            self.barrier()
        except RankLostError:
            raise
        except RuntimeError as error:
            self._end.check(error)
            raise RankLostError(f"rank {shard.rank} could not connect to the others: {error}") from error
        rendezvous.remove()

    def all_reduce(self, x: torch.Tensor) -> None:
        parts = self.all_gather(x.cpu())
        total = parts[0].float() if x.dtype in HALVES else parts[0]
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, num_columns, dtype=dtype, device=self._device)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        place_parts(self.all_gather(own_part(x, widths, self.shard.rank).cpu()), x, widths)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.shard.world, *x.shape, dtype=x.dtype)
        if x.numel():
            self._exchange(lambda group: group._allgather_base(_bytes(out), _bytes(x)))  # noqa: SLF001
        return out

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        if x.numel():
            self._exchange(lambda group: group.broadcast(_bytes(x), source))

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1, dtype=torch.uint8))

    def is_waiting(self) -> bool:
        return self._waiting

    def abort(self) -> None:
        self._end.abort()

    def lost_rank(self) -> int | None:
        return self._end.lost_rank()

    def close(self) -> None:
        self._disconnect()

    def _exchange(self, begin: Callable[[ProcessGroup], Work | None]) -> None:
        """Run one exchange. Raises RankLostError, also after the timeout; gloo then still holds the call."""
        self._end.check()
        deadline_s = time.monotonic() + self._timeout_s
        self._waiting = True
        try:
            work = begin(self._groups[0])
            while work is not None and not self._is_done(work):
                self._end.check()
                if time.monotonic() > deadline_s:
                    raise RankLostError(f"rank {self.shard.rank} waited {self._timeout_s:g} s for the other ranks")
        finally:
            self._waiting = False

    def _is_done(self, work: Work) -> bool:
        """Wait up to LOOK_EVERY. Raises RankLostError if the exchange has failed."""
        with suppress(RuntimeError):  # raised by a timeout, or by a failure, which the next wait raises again
            return work.wait(LOOK_EVERY)
        if not work.is_completed():
            return False
        try:
            return work.wait(LOOK_EVERY)
        except RuntimeError as error:
            self._end.check(error)
            raise RankLostError(f"rank {self.shard.rank} lost the connection to another rank: {error}") from error


def _disconnect(groups: list[ProcessGroup]) -> None:
    """Drop gloo's groups. gloo waits until the other rank of an abandoned call ends, too; this waits at most
    CLOSE_S."""
    closing = threading.Thread(target=groups.clear, name="gloo closes", daemon=True)
    closing.start()
    closing.join(CLOSE_S)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8, as gloo does not know every dtype."""
    return x.view(-1).view(torch.uint8)
