"""Selects the communicator of a model's ranks. No other module reads the configuration for this."""

import torch

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.parallel.communicator import Communicator, SingleRank
from vllm_lite.process_settings import WorkerGroup

LONGEST_WAIT_S = 24 * 3600.0
"""Upper bound on `ready_timeout_s` for ranks: native code and torch use integers, which have no infinity."""


def backend_of(config: ResolvedConfig, *, is_spread: bool = False) -> str:
    """Returns "none", "shared-memory", "nccl" or "gloo". Resolving `config` has checked that it fits the device. Ranks
    `is_spread` over several hosts share no memory, whatever the setting."""
    if config.tensor_parallel_size == 1:
        return "none"
    if is_spread and config.device == "cpu":
        return "gloo"
    if config.tensor_parallel_backend != "auto":
        return config.tensor_parallel_backend
    return "nccl" if config.device == "cuda" else _on_the_cpu()


def connect(
    config: ResolvedConfig, rank: int, group: WorkerGroup | None, device: torch.device, shared_bytes: int
) -> Communicator:
    """Connect this rank to the others; returns when all are connected. `shared_bytes`: the maximum bytes of a call of
    `shared_rows`. Raises ConfigError if the ranks cannot be connected this way, RankLostError if one of them ends."""
    if config.num_stages > 1:
        raise ConfigError(f"worker processes send nothing to other stages, so there is one, got {config.num_stages}")
    is_spread = group is not None and group.spread is not None
    backend, shard = backend_of(config, is_spread=is_spread), Shard.of(config, rank, config.num_stages)
    if backend == "none":
        return SingleRank(device)
    if group is None:
        raise RuntimeError("a worker that shares a model must be started with the group that it belongs to")
    timeout_s = min(config.ready_timeout_s, LONGEST_WAIT_S)
    if backend != "nccl":
        return connect_on_the_cpu(backend, shard, group, (device, shared_bytes), timeout_s)
    from vllm_lite.parallel.nccl import connect_nccl

    cpu_device = torch.device("cpu")
    host = connect_on_the_cpu("gloo" if is_spread else _on_the_cpu(), shard, group, (cpu_device, 0), timeout_s)
    try:
        return connect_nccl(host, group, device, timeout_s)
    except BaseException:
        host.close()
        raise


def _on_the_cpu() -> str:
    return "shared-memory" if cpu.available() else "gloo"


def connect_on_the_cpu(
    backend: str, shard: Shard, group: WorkerGroup, rows: tuple[torch.device, int], timeout_s: float
) -> Communicator:
    """`rows`: device and maximum bytes of `shared_rows`."""
    device, shared_bytes = rows
    if backend == "gloo":
        from vllm_lite.parallel.gloo import GlooCommunicator

        return GlooCommunicator(shard, group, device, timeout_s)
    if not cpu.available():
        raise ConfigError(
            "tensor_parallel_backend is shared-memory, but the native library is not there; reinstall the package with "
            "a C++ compiler, or give gloo"
        )
    from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator

    return SharedMemoryCommunicator(shard, group.memory, shared_bytes, timeout_s)
