"""NcclCommunicator: ranks connected by NCCL, each with a GPU of its own.

NCCL reduces and gathers tensors in GPU memory. Tensors in CPU memory go through another communicator, shared memory or
gloo: NCCL would copy a few tokens to the GPU and back, after all work queued there.

Facts from the sources of torch (ProcessGroupNCCL.cpp, 2026) and NCCL (2.30) on the calls made here; the settings and
arguments are the same in torch 2.11 and 2.13:

- With `asyncOp` false a call is one kernel on torch's current stream and returns no Work. There is no second stream and
  nothing to wait for, and a CUDA graph captures that one kernel.
- NCCL connects when its communicator is made and sets up channels at the first collective. Both allocate memory, which
  a capture must not do, so both are done at the start.
- With TORCH_NCCL_BLOCKING_WAIT torch starts no watchdog. Its watchdog would query events, and end the process a minute
  after a call has failed, without informing the engine. `_watch` replaces it.
- The flight recorder would take a Python stack trace at every call, which nobody would read.
- NCCL listens on NCCL_SOCKET_IFNAME, by default a network interface; from 2.24, its RAS listens as well.
- `abort` first makes running kernels return, then waits until no CUDA graph with a call of this communicator exists.
  So it runs in a thread for which nobody waits longer than CLOSE_S. `shutdown` would wait in the same way, and for
  the other ranks as well.
- After an abort, kernels return wrong numbers. Every step ends with a call of the CPU's communicator, which then raises
  RankLostError, so such numbers never become tokens.
- A graph with calls must be captured and launched by all ranks in the same order. It is, as all ranks execute the same
  steps.
"""

import threading
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from vllm_lite.errors import ConfigError, RankLostError
from vllm_lite.parallel.communicator import Communicator, OneStage
from vllm_lite.parallel.process_group import ProcessGroup, check_nccl, nccl_group, own_part, place_parts
from vllm_lite.parallel.rendezvous import GroupEnd, Rendezvous
from vllm_lite.process_settings import WorkerGroup
from vllm_lite.runtime import log

WATCH_EVERY_S = 0.05
CLOSE_S = 2.0

logger = log.get(__name__)


class NcclCommunicator(OneStage):
    """See Communicator."""

    graph_safe = True
    shares_memory = False

    def __init__(self, host: Communicator, group: ProcessGroup, device: torch.device, end: GroupEnd) -> None:
        """`host` is the communicator for tensors in CPU memory; it is closed with this one."""
        self.shard = host.shard
        self._host = host
        self._group = group
        self._device = device
        self._end = end
        self._sum, self._gather = AllreduceOptions(), AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False
        self._stop = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="nccl watch", daemon=True)
        self.watcher.start()

    def all_reduce(self, x: torch.Tensor) -> None:
        """As in Communicator, in an order that NCCL chooses. All ranks get the same bits, which depend on the number of
        rows."""
        self._call(lambda: self._group.allreduce([x], self._sum))

    def shared_rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, num_columns, dtype=dtype, device=self._device)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...]) -> None:
        part = own_part(x, widths, self.shard.rank)
        parts = torch.empty(self.shard.world, *part.shape, dtype=x.dtype, device=x.device)
        self._call(lambda: self._group._allgather_base(parts, part, self._gather))  # noqa: SLF001
        place_parts(parts, x, widths)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._host.all_gather(x)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        self._host.broadcast(x, source)

    def barrier(self) -> None:
        self._host.barrier()

    def is_waiting(self) -> bool:
        """Whether the CPU is waiting. While a kernel waits on the GPU, this rank looks busy, as all others do."""
        return self._host.is_waiting()

    def abort(self) -> None:
        self._host.abort()
        self._stop.set()

    def lost_rank(self) -> int | None:
        return self._host.lost_rank()

    def close(self) -> None:
        """Disconnect. Work that the GPU still does for this group is lost."""
        self._stop.set()
        self.watcher.join(CLOSE_S)
        self._host.close()

    def _call(self, put_on_stream: Callable[[], object]) -> None:
        """Make a call of NCCL. Raises RankLostError if the group has ended: NCCL's error only says that it was
        aborted."""
        self._end.check()
        try:
            put_on_stream()
        except RuntimeError as error:
            self._end.check(error)
            raise

    def _watch(self) -> None:
        """Abort NCCL's kernels when the group ends, or at `close`."""
        while not self._stop.wait(WATCH_EVERY_S) and not self._end.has_come():
            pass
        try:
            self._group.abort()
        except Exception as error:
            logger.warning("NCCL could not be aborted: %s", error)


def connect_nccl(host: Communicator, group: WorkerGroup, device: torch.device, timeout_s: float) -> NcclCommunicator:
    """Connect this rank; returns after the first collective. Raises ConfigError if torch has no NCCL or NCCL refuses
    these devices, RankLostError if a rank ends."""
    check_nccl()
    end = GroupEnd(host.shard, group.memory)
    rendezvous = Rendezvous("nccl", host.shard, group)
    try:
        store, is_spread = rendezvous.meet(end, timeout_s), group.spread is not None
        connected = nccl_group(store, host.shard, device, timeout_s, is_spread)
        communicator = NcclCommunicator(host, connected, device, end)
        communicator.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    except RankLostError:
        raise
    except (RuntimeError, ValueError) as error:
        end.check(error)
        raise ConfigError(f"NCCL cannot connect {device} to the GPUs of the other ranks: {error}") from error
    host.barrier()
    rendezvous.remove()
    return communicator
