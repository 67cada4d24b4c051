"""ResumableCalls: the calls whose streams outlive their connections.

A call that was asked for as resumable runs on when its reader has gone, as if it were still read, and is kept when it
has ended. A new reader goes on where the old one was, within `resume_s` after that has gone; then the call is aborted,
or forgotten. The last one to ask is the reader: a client comes back before the server can know that the connection it
had is broken.
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
"""Calls that have ended and have no reader; beyond that the oldest are forgotten, those that were sent whole first."""
MAX_ENDED_TOKENS = 1 << 18
"""What all of these together may hold: tokens of prompts and answers, and candidates of tokens with logprobs. As many
candidates take 100 MB. Calls that run are bounded by the queue, as all are."""


class _Kept:
    """A call, and since when it has no reader: None while there is one."""

    __slots__ = ("call", "num_held", "unread_since_s")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.unread_since_s: float | None = None
        self.num_held = 0
        """Tokens and candidates, once it has ended and has no reader."""


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
        """The call, if it is one of these: it may have ended."""
        kept = self._kept.get(name)
        return None if kept is None else kept.call

    def unread_s(self, name: str) -> float | None:
        """For how long nobody has read the call; None if somebody does, or if it is none of these."""
        kept = self._kept.get(name)
        return None if kept is None or kept.unread_since_s is None else self._clock() - kept.unread_since_s

    def add(self, call: Call) -> None:
        """Start `call`, unless it has ended, and keep it from now on. Raises ApiError if it cannot be started."""
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
        """Read `call` from `place` on; the reading before is over."""
        with self._read(call, call.read_on(place)) as reading:
            yield reading

    def forget(self, call: Call) -> None:
        """Abort what of `call` still runs, and keep it no longer. Its reader, if it has one, gets no more."""
        call.reading.replace()
        if self.get(call.name) is call:
            del self._kept[call.name]
        self.calls.end(call)

    def look(self) -> None:
        """End what nobody has come back for. When the server ends, nobody can come back for what has ended."""
        now_s = self._clock()
        for kept in list(self._kept.values()):
            if kept.unread_since_s is None:
                continue
            self._settle(kept)
            is_late = now_s - kept.unread_since_s >= self.resume_s
            if is_late or (kept.call.has_ended and self.calls.trouble is not None):
                self.forget(kept.call)

    async def watch(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    @contextmanager
    def _read(self, call: Call, reading: Reading) -> Iterator[Reading]:
        kept = self._kept[call.name]
        kept.unread_since_s, kept.num_held = None, 0
        try:
            yield reading
        except ApiError:  # this was the answer: no stream has begun
            if call.reading is reading:
                self.forget(call)
            raise
        finally:
            if call.reading is reading and self.get(call.name) is call:
                kept.unread_since_s = self._clock()
                self._settle(kept)

    def _settle(self, kept: _Kept) -> None:
        """Count a call that nobody reads as ended, if it has: it is no longer one of those that run."""
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
        for place, each in enumerate(ended[:-1]):  # one is kept, however much it holds
            if len(ended) - place <= MAX_ENDED and num_held <= MAX_ENDED_TOKENS:
                break
            num_held -= each.num_held
            self.forget(each.call)


def _num_candidates(call: Call) -> int:
    """The candidates that each token of the answer has."""
    logprobs = call.streams[0].params.logprobs
    return 0 if logprobs is None else 1 + logprobs
