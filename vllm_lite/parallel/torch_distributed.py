"""Ranks that meet through torch.distributed: NCCL between GPUs, gloo as oracle and fallback."""

import torch

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import WorkerGroup
from vllm_lite.parallel.communicator import SingleRank


class TorchCommunicator(SingleRank):
    """See Communicator."""

    def __init__(self, backend: str, shard: Shard, group: WorkerGroup, device: torch.device, timeout_s: float) -> None:
        raise NotImplementedError
