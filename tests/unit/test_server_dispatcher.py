"""When a call is woken for new tokens: for first and last ones at once, for others more rarely with many streams."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.dispatcher import CHUNK_S, MAX_PAUSE_S, MIN_PAUSE_S, Throttle

MANY = 64


class FakeCall:
    """Counts."""

    def __init__(self) -> None:
        self.was_woken = False
        self.num_wakes = 0

    def wake(self) -> None:
        self.was_woken = True
        self.num_wakes += 1


class FakeLoop:
    """Keeps timers for the test to fire."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        self.timers.append((delay_s, call))
        return object()

    def fire(self) -> None:
        _, call = self.timers.pop(0)
        call()


def made() -> tuple[FakeLoop, Callable[..., None], Throttle]:
    loop = FakeLoop()
    throttle = Throttle(cast(asyncio.AbstractEventLoop, loop))

    def wake(call: FakeCall, num_streams: int = MANY, *, at_once: bool = False) -> None:
        throttle.wake(cast(Call, call), num_streams, at_once=at_once)

    return loop, wake, throttle


def test_few_streams_are_woken_at_once() -> None:
    loop, wake, _ = made()
    call = FakeCall()
    for _ in range(3):
        wake(call, int(MIN_PAUSE_S / CHUNK_S) - 1)
    assert (call.num_wakes, loop.timers) == (3, [])


def test_first_and_last_tokens_of_many_streams_go_at_once_and_others_together() -> None:
    loop, wake, _ = made()
    calls = [FakeCall() for _ in range(MANY)]
    for _ in range(4):
        for call in calls:
            wake(call)
    assert [call.num_wakes for call in calls] == [1] * MANY
    assert [delay_s for delay_s, _ in loop.timers] == [pytest.approx(MANY * CHUNK_S)]
    wake(calls[0], at_once=True)
    loop.fire()
    assert [call.num_wakes for call in calls] == [2] * MANY  # the one that has been woken is not woken again
    wake(calls[1])
    assert len(loop.timers) == 1
    loop.fire()
    assert [call.num_wakes for call in calls[:3]] == [2, 3, 2]


def test_no_call_waits_for_long() -> None:
    loop, wake, _ = made()
    call = FakeCall()
    wake(call, 10_000)
    wake(call, 10_000)
    assert [delay_s for delay_s, _ in loop.timers] == [MAX_PAUSE_S]


def test_a_dropped_call_is_forgotten() -> None:
    loop, wake, throttle = made()
    call = FakeCall()
    wake(call)
    wake(call)
    throttle.forget(cast(Call, call))
    loop.fire()
    assert call.num_wakes == 1
