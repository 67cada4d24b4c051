"""ListCall: one HTTP request about many texts, answered when all are done: vectors, scores, decisions.

Each text is a stream of the engine. A window bounds those in the engine at a time, so that a long list neither fills it
nor delays other requests; each finished text makes room for the next.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from vllm_lite.client.pooling import PoolingStream
from vllm_lite.client.streams.stream import RequestStream
from vllm_lite.errors import RequestError
from vllm_lite.server.calls.call import CallContext, StreamsCall
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.http.disconnect import disconnected, until_disconnected
from vllm_lite.server.openai.errors import ApiError, failed, refused

S = TypeVar("S", PoolingStream, RequestStream)


class Window:
    """Bound on the texts of one call that are in the engine at a time: a few steps of work, whatever the length of the
    texts."""

    STEPS = 3

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_texts = self.STEPS * max_num_seqs
        self.max_tokens = self.STEPS * max_num_batched_tokens

    def has_room(self, num_texts: int, num_tokens: int) -> bool:
        """Whether another text may start beside `num_texts` with `num_tokens` in all."""
        return not num_texts or (num_texts < self.max_texts and num_tokens < self.max_tokens)


class ListCall(StreamsCall, Generic[S]):
    """A call of `num_texts` texts, with the part of Call's interface that the registry uses."""

    def __init__(self, call_id: str, style: AnswerStyle, num_texts: int, window: Window, owner: str = "") -> None:
        """`num_texts`: number of texts that will be added in all."""
        super().__init__(call_id, style, owner)
        self._arrival_s = time.monotonic()
        self.streams: list[S] = []
        self.num_texts = num_texts
        self.window = window
        self.is_over = False
        self.reading: ListCall[S] = self
        self.sent_s = float("inf")
        """Never due for a comment: the answer is not streamed."""
        self._num_done = 0
        self._num_tokens_done = 0
        self._num_tokens = 0
        self._changed = asyncio.Event()

    # ---- as Call

    def context(self, index: int) -> CallContext:
        return CallContext(self.created, index, self.num_texts, are_forks=False, style=self.style, owner=self.owner)

    @property
    def num_sequences(self) -> int:
        """Maximum number of this call's sequences in the engine at a time."""
        return min(self.num_texts, self.window.max_texts)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_tokens

    @property
    def finished(self) -> bool:
        return len(self.streams) == self.num_texts and all(stream.finished for stream in self.streams)

    @property
    def is_late(self) -> bool:
        """Whether the call's `deadline_ms` has passed."""
        limit_ms = self.streams[0].params.deadline_ms if self.streams else None
        return limit_ms is not None and time.monotonic() >= self._arrival_s + limit_ms / 1000

    def wake(self) -> None:
        self.was_woken = True
        self._changed.set()

    def cut_short(self) -> None:
        """End the call at shutdown."""
        self.was_cut = not self.finished
        self.wake()

    def end(self) -> None:
        """Report that the client has disconnected."""
        self.is_over = True
        self._changed.set()

    # ---- its own

    def add(self, streams: Sequence[S]) -> None:
        self.streams += streams
        self._num_tokens += sum(len(stream.prompt.token_ids) for stream in streams)

    def has_room(self) -> bool:
        """Whether another text may start."""
        while self._num_done < len(self.streams) and self.streams[self._num_done].finished:
            self._num_tokens_done += len(self.streams[self._num_done].prompt.token_ids)
            self._num_done += 1
        num_open = len(self.streams) - self._num_done
        return self.window.has_room(num_open, self._num_tokens - self._num_tokens_done)

    async def wait(self) -> None:
        """Wait until a text is done or the call is over. The session ends every stream by a deadline of its own."""
        await self._changed.wait()
        self._changed.clear()

    def check(self, field: str) -> None:
        """Raise ApiError if the call is over. `field` is the body's field that errors of texts name."""
        if self.is_over:
            raise disconnected()
        if self.was_cut:
            raise ApiError(503, "the server is shutting down; ask another")
        error = self.error
        if error is None:
            return
        if isinstance(error, RequestError):
            raise ApiError(408, str(error)) if self.is_late else refused(error, field)
        raise failed(error)


@contextmanager
def running(calls: Any, call: ListCall[Any], receive: Receive) -> Iterator[None]:
    """Run `call` as one of `calls` within the context, and end it if its client disconnects."""
    watch = asyncio.ensure_future(until_disconnected(receive))
    watch.add_done_callback(lambda _: call.end())
    try:
        with calls.run(call):
            yield
    finally:
        watch.cancel()
