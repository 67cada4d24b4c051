"""ResumableCalls: calls whose streams outlive their connections.

A resumable call continues to run when its reader disconnects, and is kept after its end. A new reader can continue
within `resume_s`; after that the call is aborted, or forgotten if it has ended. The latest connection is the reader: a
client may return before the server can detect that its old connection broke.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_lite.server.calls.call import Call, Reading
from vllm_lite.server.calls.place import StreamPosition
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.openai.errors import ApiError, in_use

LOOK_S = 0.25
MAX_ENDED = 1024
"""Maximum number of ended calls without a reader. Beyond it the oldest are forgotten, first those that were sent
whole."""
MAX_ENDED_TOKENS = 1 << 18
"""Bound on what these calls hold together: tokens of prompts and answers, and logprob candidates. As many candidates
take 100 MB. Running calls are bounded by the queue limits."""


class _Kept:
    """A call, and the time since which it has no reader; None while it has one."""

    __slots__ = ("call", "num_held", "unread_since_s")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.unread_since_s: float | None = None
        self.num_held = 0
        """Number of tokens and candidates held, set once the call has ended and has no reader."""


class ResumableCalls:
    """Holds the resumable calls of this server, with and without a reader. Every method is called on the loop."""

    def __init__(self, calls: Calls, resume_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.calls = calls
        self.resume_s = resume_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> Call | None:
        """The resumable call of this name, running or ended."""
        kept = self._kept.get(name)
        return None if kept is None else kept.call

    def unread_s(self, name: str) -> float | None:
        """Seconds since the call's last reader left; None if it has a reader, or is not one of these."""
        kept = self._kept.get(name)
        return None if kept is None or kept.unread_since_s is None else self._clock() - kept.unread_since_s

    def add(self, call: Call) -> None:
        """Start `call`, unless it has ended, and keep it. Raises ApiError if it cannot be started."""
        if call.name in self._kept:
            raise in_use(call.id)
        if not call.has_ended:
            self.calls.start(call)
        self._kept[call.name] = _Kept(call)

    @contextmanager
    def run(self, call: Call) -> Iterator[Reading]:
        """Start `call`, and read it. Raises ApiError if it cannot be started."""
        self.add(call)
        with self._read(call, call.reading) as reading:
            yield reading

    @contextmanager
    def resume(self, call: Call, place: StreamPosition) -> Iterator[Reading]:
        """Read `call` from `place` on, and end its earlier reading."""
        with self._read(call, call.read_on(place)) as reading:
            yield reading

    def forget(self, call: Call) -> None:
        """Abort `call` if it still runs, and stop keeping it. Its reader, if any, gets no more."""
        call.reading.replace()
        if self.get(call.name) is call:
            del self._kept[call.name]
        self.calls.end(call)

    def look(self) -> None:
        """Forget calls without a reader for `resume_s`. During shutdown, ended calls are forgotten at once."""
        now_s = self._clock()
        for kept in list(self._kept.values()):
            if kept.unread_since_s is None:
                continue
            self._settle(kept)
            is_late = now_s - kept.unread_since_s >= self.resume_s
            if is_late or (kept.call.has_ended and self.calls.trouble is not None):
                self.forget(kept.call)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    @contextmanager
    def _read(self, call: Call, reading: Reading) -> Iterator[Reading]:
        kept = self._kept[call.name]
        kept.unread_since_s, kept.num_held = None, 0
        try:
            yield reading
        except ApiError:  # the response is this error: no stream has begun
            if call.reading is reading:
                self.forget(call)
            raise
        finally:
            if call.reading is reading and self.get(call.name) is call:
                kept.unread_since_s = self._clock()
                self._settle(kept)

    def _settle(self, kept: _Kept) -> None:
        """Move a call without a reader from the running to the ended ones, if it has ended, and enforce their
        limits."""
        call = kept.call
        if kept.num_held or not call.has_ended:
            return
        self.calls.end(call)
        kept.num_held = sum(
            len(stream.prompt.token_ids) + stream.num_tokens * (1 + _num_candidates(call)) for stream in call.streams
        )
        ended = [each for each in self._kept.values() if each.num_held]
        ended.sort(key=lambda each: (not each.call.reading.is_complete, each.unread_since_s))
        num_held = sum(each.num_held for each in ended)
        for place, each in enumerate(ended[:-1]):  # the newest is kept, however much it holds
            if len(ended) - place <= MAX_ENDED and num_held <= MAX_ENDED_TOKENS:
                break
            num_held -= each.num_held
            self.forget(each.call)


def _num_candidates(call: Call) -> int:
    """Number of logprob candidates per token of the answer."""
    logprobs = call.streams[0].params.logprobs
    return 0 if logprobs is None else 1 + logprobs
