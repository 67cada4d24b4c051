"""RowShare: each rank's share of the rows of complete logits, and the exchange of per-row results."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.checkpoint.shard import Shard
from vllm_lite.parallel.communicator import Communicator

Records = NDArray[Any]
"""One record a row, in any dtype without pointers, also a structured one."""


class RowShare(NamedTuple):
    """The rows that one rank works on."""

    own: slice
    size: int
    """Number of records that each rank contributes: the maximum number of rows of a rank."""
    num_rows: int

    @classmethod
    def of(cls, num_rows: int, shard: Shard) -> "RowShare":
        """Consecutive rows for each rank; all rows for every rank if there are fewer rows than ranks. A rank without
        rows would fall asleep in the exchange, and waking it takes as long as a row."""
        if num_rows < shard.world:
            return cls(slice(0, num_rows), num_rows, num_rows)
        size = -(-num_rows // shard.world)
        return cls(slice(size * shard.rank, min(size * (shard.rank + 1), num_rows)), size, num_rows)

    def exchange(self, communicator: Communicator, own: Records) -> Records:  # [num_rows], also of the result
        """The records of all rows, on all ranks. If every rank has all rows, those of rank 0 are used."""
        return exchange(communicator, own, self.size).reshape(-1)[: self.num_rows]


def exchange(communicator: Communicator, own: Records, num_records: int) -> Records:  # [world, num_records]
    """Records of every rank. `num_records` is the same on all ranks and at least len(own); the rest is zero."""
    if len(own) < num_records:
        own = np.append(own, np.zeros(num_records - len(own), own.dtype))
    gathered = communicator.all_gather(torch.from_numpy(own.view(np.uint8)))
    return gathered.numpy().view(own.dtype)
