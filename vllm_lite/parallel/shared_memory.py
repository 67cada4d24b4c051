"""Ranks on one host that meet in shared memory (csrc/cpu/collectives.cpp)."""

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.parallel.communicator import SingleRank


class SharedMemoryCommunicator(SingleRank):
    """See Communicator. Calls are native and can be part of a recorded program."""

    def __init__(self, shard: Shard, memory: int, shared_bytes: int, timeout_s: float) -> None:
        """`memory`: the descriptor of the group's memory. Returns when all ranks have come."""
        raise NotImplementedError
