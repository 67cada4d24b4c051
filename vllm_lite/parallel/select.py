"""Chooses how the ranks of a model exchange what they compute. This is the one place that reads the configuration for
that."""

import torch

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import ResolvedConfig, WorkerGroup
from vllm_lite.kernels import cpu
from vllm_lite.parallel.communicator import Communicator, SingleRank


def backend_of(config: ResolvedConfig) -> str:
    """ "none", "shared-memory", "nccl" or "gloo"."""
    if config.tensor_parallel_size == 1:
        return "none"
    if config.tensor_parallel_backend != "auto":
        return config.tensor_parallel_backend
    if config.device == "cuda":
        return "nccl"
    return "shared-memory" if cpu.available() else "gloo"


def connect(
    config: ResolvedConfig, rank: int, group: WorkerGroup | None, device: torch.device, shared_bytes: int
) -> Communicator:
    """Connect this rank to the others; returns when all have come. `shared_bytes`: the most that `shared_rows` is asked
    for at once. Raises ConfigError if the ranks cannot be connected this way, RankLostError if one of them ends.
    """
    backend, shard = backend_of(config), Shard(rank, config.tensor_parallel_size)
    if backend == "none":
        return SingleRank(device)
    if group is None:
        raise RuntimeError("a worker that shares a model must be started with the group that it belongs to")
    if backend == "shared-memory":
        from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator(shard, group.memory, shared_bytes, config.ready_timeout_s)
    from vllm_lite.parallel.torch_distributed import TorchCommunicator

    return TorchCommunicator(backend, shard, group, device, config.ready_timeout_s)
