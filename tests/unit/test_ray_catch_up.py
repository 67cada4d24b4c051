"""State that a replica that starts later takes over from the others."""

from concurrent.futures import Future
from typing import Any

import msgspec

from tests.fakes import STATS
from vllm_lite.client.engines.any_session import Asking
from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.operations import OperationDone, PauseGeneration, Sleep, UpdateWeights
from vllm_lite.ray.catch_up import Memory, ReplicaState, Step, steps, take

A, B = AdapterInfo("a", "/a"), AdapterInfo("b", "/b", "parent")
NEW = ReplicaState(2, 20.0, [])


def test_the_oldest_is_the_example() -> None:
    old, later = ReplicaState(0, 10.0, [A]), ReplicaState(1, 15.0, [B], sleep_level=1)
    assert steps(NEW, [later, NEW, old]) == [LoadAdapter(0, "a", "/a", in_place=True)]
    assert steps(old, [later, NEW, old]) == []
    assert steps(NEW, [NEW]) == steps(NEW, []) == []


def test_all_operations_that_a_replica_has_had() -> None:
    old = ReplicaState(0, 10.0, [A, B], "/weights", is_paused=True, sleep_level=2)
    own = ReplicaState(2, 20.0, [AdapterInfo("a", "/before"), AdapterInfo("of the settings", "/c")])
    made = steps(own, [old])
    assert made == [
        UpdateWeights("/weights", "keep"),
        LoadAdapter(0, "a", "/a", in_place=True),
        LoadAdapter(0, "b", "/b", in_place=True, parent="parent"),
        UnloadAdapter(0, "of the settings"),
        Sleep(2, "keep"),
        PauseGeneration("keep"),
    ]
    assert steps(ReplicaState(2, 20.0, [B, A], "/weights", is_paused=True, sleep_level=2), [old]) == []


def test_initial_weights_are_not_repeated() -> None:
    first = msgspec.structs.replace(STATS, model="/node/model")
    memory = Memory(3, first)
    assert memory.state(first, [A]).weights == ""
    state = memory.state(msgspec.structs.replace(first, model="/other", is_paused=True, sleep_level=1), [A])
    assert (state.number, state.adapters, state.weights, state.is_paused, state.sleep_level) == (
        3,
        [A],
        "/other",
        True,
        1,
    )


class Engine(Asking):
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, message: Any, answer: type[Any]) -> "Future[Any]":
        self.asked.append(message)
        future: Future[Any] = Future()
        if isinstance(message, LoadAdapter):
            assert answer is AdapterAnswer
            future.set_result(AdapterAnswer(1, message.name, error="no such folder"))
        elif isinstance(message, UpdateWeights):
            future.set_exception(EngineError("it is being replaced"))
        else:
            future.set_result(OperationDone())
        return future


async def test_a_failed_step_does_not_end_the_others() -> None:
    engine = Engine()
    made: list[Step] = [UpdateWeights("/w"), LoadAdapter(0, "a", "/a"), Sleep(1)]
    await take(list(made), engine)
    assert engine.asked == made
