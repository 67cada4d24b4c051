"""Ranks' shares of rows of complete logits, and the exchange of their findings."""

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
    """How many records each rank gives: as many as the rank with the most rows has."""
    num_rows: int

    @classmethod
    def of(cls, num_rows: int, shard: Shard) -> "RowShare":
        """Rows side by side; all of them for each rank where there are fewer than ranks. A rank without a row would
        fall asleep in the exchange, and to wake it takes as long as a row does."""
        if num_rows < shard.world:
            return cls(slice(0, num_rows), num_rows, num_rows)
        size = -(-num_rows // shard.world)
        return cls(slice(size * shard.rank, min(size * (shard.rank + 1), num_rows)), size, num_rows)

    def exchange(self, communicator: Communicator, own: Records) -> Records:  # [num_rows], also of the result
        """Return the records of all rows, by all ranks. Where all have worked on all rows, rank 0's count."""
        return exchange(communicator, own, self.size).reshape(-1)[: self.num_rows]


def exchange(communicator: Communicator, own: Records, num_records: int) -> Records:  # [world, num_records]
    """Return every rank's records. `num_records` is the same on all ranks and at least len(own); those behind a rank's
    last one are zero."""
    if len(own) < num_records:
        own = np.append(own, np.zeros(num_records - len(own), own.dtype))
    gathered = communicator.all_gather(torch.from_numpy(own.view(np.uint8)))
    return gathered.numpy().view(own.dtype)
