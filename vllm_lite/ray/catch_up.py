"""State that a replica started later copies from the others: adapters, weights that were updated, a sleep or a pause.
No ray.

It asks the others before it serves, and again once it serves: operations in between reach only the serving replicas.
"""

import asyncio
import time

import msgspec

from vllm_lite.client.engines.any_session import Asking
from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.operations import OperationDone, PauseGeneration, Sleep, UpdateWeights
from vllm_lite.protocol.stats import Stats
from vllm_lite.runtime import log

Step = LoadAdapter | UnloadAdapter | UpdateWeights | Sleep | PauseGeneration

logger = log.get(__name__)


class ReplicaState(msgspec.Struct, frozen=True):
    """State of a replica after its operations. `started_s`: seconds since the epoch; `weights`: the folder of updated
    weights, "" if it has its first ones."""

    number: int
    started_s: float
    adapters: list[AdapterInfo]
    weights: str = ""
    is_paused: bool = False
    sleep_level: int | None = None


states = msgspec.msgpack.Decoder(ReplicaState)


class Memory:
    """Makes the ReplicaState of an engine from its statistics."""

    def __init__(self, number: int, first: Stats) -> None:
        """`first`: the statistics of the new engine."""
        self._number, self._first_weights = number, first.model
        self._started_s = time.time()

    def state(self, stats: Stats, adapters: list[AdapterInfo]) -> ReplicaState:
        weights = "" if stats.model == self._first_weights else stats.model
        return ReplicaState(self._number, self._started_s, adapters, weights, stats.is_paused, stats.sleep_level)


def steps(own: ReplicaState, others: list[ReplicaState]) -> list[Step]:
    """Steps that bring a replica to the state of the oldest serving one; none if it is the oldest."""
    older = [other for other in others if other.started_s < own.started_s]
    if not older:
        return []
    example = min(older, key=lambda other: other.started_s)
    made: list[Step] = []
    if example.weights and example.weights != own.weights:
        made.append(UpdateWeights(example.weights, "keep"))
    has, wanted = ({info.name: info for info in each.adapters} for each in (own, example))
    made += [LoadAdapter(0, each.name, each.path, True, each.parent) for each in wanted.values() if not _has(has, each)]
    made += [UnloadAdapter(0, name) for name in has if name not in wanted]
    if example.sleep_level is not None and own.sleep_level is None:
        made.append(Sleep(example.sleep_level, "keep"))
    if example.is_paused and not own.is_paused:
        made.append(PauseGeneration("keep"))
    return made


def _has(adapters: dict[str, AdapterInfo], wanted: AdapterInfo) -> bool:
    found = adapters.get(wanted.name)
    return found is not None and found.path == wanted.path


async def take(made: list[Step], engine: Asking) -> None:
    """Have the engine do all steps. A step that fails is logged, and the others are done: requests for an adapter that
    some replica lacks are refused."""
    for step in made:
        is_adapter = isinstance(step, LoadAdapter | UnloadAdapter)
        try:
            answer: AdapterAnswer | OperationDone
            answer = await asyncio.wrap_future(engine.ask(step, AdapterAnswer if is_adapter else OperationDone))
            error = answer.error
        except EngineError as failed:
            error = str(failed)
        if error is not None:
            logger.warning("this replica is not as those that serve, it could not %r: %s", step, error)
        else:
            logger.info("as the replicas that serve: %r", step)
