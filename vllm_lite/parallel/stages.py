"""Agreement of a model's pipeline stages, over `send` and `receive`.

The ranks of each stage have already agreed among themselves. All stages make the same calls in the same order; with one
stage, calls cost nothing.
"""

import torch

from vllm_lite.parallel.communicator import Communicator


def take_from_last(x: torch.Tensor, communicator: Communicator) -> None:
    """Copy x from the last stage to the others, in place. x is contiguous."""
    stage = communicator.shard.stage
    if not stage.is_last:
        communicator.receive(x, stage.count - 1)
        return
    for other in range(stage.index):
        communicator.send(x, other)


def take_least(x: torch.Tensor, communicator: Communicator) -> None:
    """Take the minimum of each element of x over all stages, in place. x is contiguous."""
    stage = communicator.shard.stage
    if not stage.is_last:
        communicator.send(x, stage.count - 1)
    theirs = torch.empty_like(x)
    for other in range(stage.index) if stage.is_last else ():
        communicator.receive(theirs, other)
        torch.minimum(x, theirs, out=x)
    take_from_last(x, communicator)
