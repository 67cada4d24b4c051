"""Pace: streams of fast models are told of their news more rarely the more of them there are.

A piece of a stream costs some 40 us of a core however much is in it, most of that in the system call. Sent as fast as
tokens come, the pieces of many streams would take the time in which the model makes tokens.
"""

import asyncio

from vllm_lite.server.calls.call import Call

PIECE_S = 0.0002
"""For each stream, between two pieces of one: all together take about a fifth of a core."""
LEAST_S = 0.004
"""The engine gathers for as long itself."""
MOST_S = 0.05


class Pace:
    """Every method is called on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Call, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, call: Call, num_streams: int, *, at_once: bool) -> None:
        """There is news for `call`, one of `num_streams`. Its first news never wait."""
        pause_s = min(num_streams * PIECE_S, MOST_S)
        if at_once or not call.was_woken or pause_s < LEAST_S:
            self._waiting.pop(call, None)
            call.wake()
            return
        self._waiting[call] = None
        if self._timer is None:
            self._timer = self._loop.call_later(pause_s, self._wake_all)

    def forget(self, call: Call) -> None:
        self._waiting.pop(call, None)

    def _wake_all(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.wake()
