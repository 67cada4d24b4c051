"""broadcast() over calls that answer, fail or hang."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.deadlines import scaled
from vllm_lite.ray.broadcast import broadcast
from vllm_lite.ray.session import ReplicaLostError

Replica = Callable[[], Awaitable[bytes]]


class Called:
    """Ray Serve's answer for each replica."""

    def __init__(self, answer: Replica) -> None:
        self.get_async = answer


class Handle:
    def __init__(self, *answers: Replica) -> None:
        self._answers = answers

    def broadcast(self, method: str, *arguments: bytes) -> Any:
        assert (method, arguments) == ("ask", (b"?",))
        return self

    async def _fetch_replica_results_async(self) -> list[Called]:
        return [Called(answer) for answer in self._answers]


async def answers() -> bytes:
    return b"yes"


async def fails() -> bytes:
    raise ValueError("it died\nin two lines")


async def hangs() -> bytes:
    await asyncio.Event().wait()
    return b""


async def ask(
    *replicas: Callable[[], Awaitable[bytes]], timeout_s: float, num_late: int = 0
) -> tuple[list[bytes], list[str]]:
    async with asyncio.timeout(scaled(10)):
        return await broadcast(Handle(*replicas), "ask", timeout_s, b"?", num_late=num_late)


async def test_a_replica_that_hangs_does_not_cost_the_answers_of_others() -> None:
    found, errors = await ask(answers, hangs, fails, answers, timeout_s=0.01)
    assert found == [b"yes", b"yes"]
    assert errors == ["TimeoutError: a replica did not answer within 0.01 s", "ValueError: it died"]


async def test_a_replica_that_was_silent_before_is_not_waited_for() -> None:
    found, errors = await ask(answers, hangs, timeout_s=scaled(1e6), num_late=1)
    assert (found, len(errors)) == ([b"yes"], 1)


async def test_no_answer_at_all() -> None:
    with pytest.raises(ReplicaLostError, match="did not answer"):
        await ask(hangs, hangs, timeout_s=0.01, num_late=2)
    with pytest.raises(ReplicaLostError, match=r"ValueError: it died$"):
        await ask(fails, timeout_s=0.01)
    with pytest.raises(ReplicaLostError, match="there is no replica"):
        await ask(timeout_s=0.01)
