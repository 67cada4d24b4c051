"""Agreement of the stages that share out a model's layers, over `send` and `receive`.

The ranks of each stage have agreed among themselves before. All stages make the same calls in the same order; a call
costs nothing where there is one stage.
"""

import torch

from vllm_lite.parallel.communicator import Communicator


def take_from_last(x: torch.Tensor, communicator: Communicator) -> None:
    """x becomes what it is in the last stage, in place. It is contiguous."""
    stage = communicator.shard.stage
    if not stage.is_last:
        communicator.receive(x, stage.count - 1)
        return
    for other in range(stage.index):
        communicator.send(x, other)


def take_least(x: torch.Tensor, communicator: Communicator) -> None:
    """Each element of x becomes the smallest that a stage has, in place. It is contiguous."""
    stage = communicator.shard.stage
    if not stage.is_last:
        communicator.send(x, stage.count - 1)
    theirs = torch.empty_like(x)
    for other in range(stage.index) if stage.is_last else ():
        communicator.receive(theirs, other)
        torch.minimum(x, theirs, out=x)
    take_from_last(x, communicator)
