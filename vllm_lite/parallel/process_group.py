"""Process groups of torch.distributed, gloo and NCCL. They listen on the loopback interface, or, for ranks on several
hosts, at each host's address.

They are created without torch's default group, of which a process can have one, so ranks may be threads of one process.
Their gathers need parts of equal size: `own_part` and `place_parts` pad columns of different widths.
"""

import os
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, Work, is_nccl_available

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = "=lo"
NCCL_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": LOOPBACK_ONLY,
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
}
"""Variables that NCCL and torch read when the first communicator is made; nccl.py has the reasons. Values that the user
has set are kept."""


class ProcessGroup(Protocol):
    """The methods of torch's process groups that are used here. They start an operation; Work is used to wait for
    it."""

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work | None: ...

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: object = ...) -> Work | None: ...  # noqa: A002

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work | None: ...

    def abort(self) -> None: ...


def gloo_group(store: Store, shard: Shard, timeout_s: float, address: str = LOOPBACK) -> ProcessGroup:
    """Connect to all other ranks. Raises RuntimeError if that fails."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    options._threads = 1  # noqa: SLF001  (there is one call at a time)
    return cast("ProcessGroup", ProcessGroupGloo(store, shard.rank, shard.world, options))


def check_nccl() -> None:
    """Raises ConfigError if this torch has no NCCL."""
    if not is_nccl_available():
        raise ConfigError(
            f"torch {torch.__version__} has no NCCL, which several GPUs need to exchange data; install a torch with "
            "CUDA, or give --tensor-parallel-backend gloo"
        )


def nccl_group(
    store: Store, shard: Shard, device: torch.device, timeout_s: float, is_spread: bool = False
) -> ProcessGroup:
    """Connect `device` to the devices of all other ranks. Raises RuntimeError if that fails."""
    from torch.distributed import ProcessGroupNCCL  # missing in a torch without NCCL

    for name, value in NCCL_ENVIRONMENT.items():
        if not (is_spread and value == LOOPBACK_ONLY):
            os.environ.setdefault(name, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    group = ProcessGroupNCCL(store, shard.rank, shard.world, options)
    group.eager_connect_single_device(device)
    return cast("ProcessGroup", group)


def own_part(x: torch.Tensor, widths: tuple[int, ...], rank: int) -> torch.Tensor:
    """The columns of x [n, sum of widths] that `rank` has filled, as [n, max(widths)]; the padding is undefined."""
    start = sum(widths[:rank])
    part = torch.empty(x.shape[0], max(widths), dtype=x.dtype, device=x.device)
    part[:, : widths[rank]].copy_(x[:, start : start + widths[rank]])
    return part


def place_parts(parts: torch.Tensor, x: torch.Tensor, widths: tuple[int, ...]) -> None:
    """Copy `parts` [world, n, max(widths)] to their columns of x [n, sum of widths]."""
    start = 0
    for part, width in zip(parts, widths, strict=True):
        x[:, start : start + width].copy_(part[:, :width])
        start += width
