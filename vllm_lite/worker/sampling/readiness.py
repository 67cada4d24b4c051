"""Readiness of grammars: sequences whose grammar is still being compiled get no token in a step.

No other sequence waits for a grammar. All ranks must agree: a grammar is ready when it is ready on all ranks, and fails
when it fails on one. Sequences with settled grammars cost nothing here.
"""

from collections.abc import Collection
from concurrent.futures import wait

import torch

from vllm_lite.parallel.communicator import Communicator
from vllm_lite.parallel.stages import take_least
from vllm_lite.worker.sampling.masks import SequenceMask

FAILED, COMING, READY = 0, 1, 2
"""States of a grammar; ranks agree on the smallest one."""
PATIENCE_S = 0.005
"""Seconds that a step waits in which all sequences lack their grammars, so that empty steps do not spin."""
MAX_ROUNDS = 6000
"""Number of such waits after which a grammar fails that a step needs: half a minute. All ranks count alike."""
TOO_LATE = "its grammar could not be compiled in half a minute"
FAILED_ELSEWHERE = "its grammar could not be compiled on one of the model's ranks"


def settle(masks: Collection[SequenceMask], communicator: Communicator, *, patient: bool) -> list[bool]:
    """Settle the sources that are ready on all ranks. Returns whether each of `masks` is settled. `patient`: wait for
    up to PATIENCE_S, since the step has nothing else to do."""
    if patient:
        coming = [mask.coming for mask in masks if mask.coming is not None and not mask.coming.done()]
        wait(coming, PATIENCE_S, return_when="FIRST_COMPLETED")
    own = torch.tensor([_state(mask) for mask in masks], dtype=torch.uint8)
    if communicator.shard.world > 1:
        own = communicator.all_gather(own).amin(0)  # of [world, n]
    take_least(own, communicator)
    agreed = own.tolist()
    for mask, state in zip(masks, agreed, strict=True):
        if state != COMING:
            mask.settle(_failure(mask) if state == FAILED else None)
    return [state != COMING for state in agreed]


def _state(mask: SequenceMask) -> int:
    coming = mask.coming
    if coming is None or not coming.done():
        return READY if coming is None else COMING
    return READY if coming.exception() is None else FAILED


def _failure(mask: SequenceMask) -> str:
    coming = mask.coming
    if coming is None or not coming.done() or (error := coming.exception()) is None:
        return FAILED_ELSEWHERE
    return str(error)
