"""Call: one HTTP request that generates. It has one stream for each prompt, and a choice for each sample of these."""

import asyncio
import time
from collections.abc import Iterator, Sequence

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.sample import Cursor
from vllm_lite.client.stream import RequestStream
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.api import MAX_CONTEXT_BYTES, ForkRequest, Generate
from vllm_lite.server.openai.chunks import AnswerStyle

MAX_ECHO_CHARS = (MAX_CONTEXT_BYTES - 4096) // 4
"""A longer echo is left out of the context: forks of the call that another server makes are answered without it."""


class CallContext(msgspec.Struct, frozen=True):
    """What any API server needs to know of a call, beside its tokens: the engine keeps it with each of the streams.

    `index` is the stream's among `num_streams`; they are `are_forks` of one request, or have a prompt each.
    """

    created: int
    index: int
    num_streams: int
    are_forks: bool
    style: AnswerStyle


class Choice:
    """One continuation of one prompt, as a choice of the answer. `delta()` delivers each part of it once."""

    __slots__ = ("_cursor", "_ranked", "index", "stream")

    def __init__(self, index: int, stream: RequestStream, sample_index: int) -> None:
        """`sample_index` counts within the stream: by sample or, where samples are ranked at the end, by rank."""
        self.index = index
        self.stream = stream
        self._cursor = None if stream.ends_at_once else Cursor(sample_index, stream.samples[sample_index])
        self._ranked: int | None = sample_index

    def delta(self) -> CompletionOutput | None:
        """What is new since the last call, None if nothing is. An error is the whole call's, which reports it."""
        if self._cursor is not None:
            return self._cursor.delta()
        if self._ranked is None or not self.stream.finished:
            return None
        rank, self._ranked = self._ranked, None
        return self.stream.output().outputs[rank]


class Call:
    """One HTTP request that generates. It is woken whenever one of its streams has something new."""

    def __init__(
        self, call_id: str, streams: Sequence[RequestStream], style: AnswerStyle, *, are_forks: bool = False
    ) -> None:
        """`streams` have the same number of samples each; if they `are_forks` of one request its prompt counts once."""
        self.id = call_id
        self.created = int(time.time())
        self.streams = streams
        self.style = style
        self.are_forks = are_forks
        self._prompts = streams[:1] if are_forks else streams
        self._num_inherited = self._num_tokens
        num = streams[0].params.n
        self.choices = [
            Choice(place * num + sample, stream, sample)
            for place, stream in enumerate(streams)
            for sample in range(num)
        ]
        self.is_disconnected = False
        self.was_cut = False
        """The server ends before this had a single token of its own."""
        self.sent_s = time.monotonic()
        """When its client was last sent something."""
        self.was_woken = False
        self._changed = asyncio.Event()

    def context(self, index: int) -> CallContext:
        style, count = self.style, len(self.streams)
        if style.echo and (count > 1 or len(style.echo[0]) > MAX_ECHO_CHARS):
            style = msgspec.structs.replace(style, echo=())  # only a call with one stream can be forked
        return CallContext(self.created, index, count, self.are_forks, style)

    def message(self, index: int) -> Generate | ForkRequest:
        """What starts stream `index` in the engine, where any API server finds it by the call's id."""
        context = msgspec.msgpack.encode(self.context(index))
        return msgspec.structs.replace(self.streams[index].message(), external_id=self.id, context=context)

    @property
    def finished(self) -> bool:
        return all(stream.finished for stream in self.streams)

    @property
    def has_begun(self) -> bool:
        """Whether it has a token of its own: a fork is made with its parent's."""
        return self._num_tokens > self._num_inherited

    @property
    def num_sequences(self) -> int:
        """Samples of all prompts, each of which the engine computes as a sequence."""
        return sum(len(stream.samples) for stream in self.streams)

    @property
    def _num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def error(self) -> VllmLiteError | None:
        """The error of the first stream that failed."""
        return next((stream.error for stream in self.streams if stream.error is not None), None)

    @property
    def is_late(self) -> bool:
        """Whether its `deadline_ms` has passed."""
        limit_ms, arrival_s = self.streams[0].params.deadline_ms, self.streams[0].metrics.arrival_time
        return limit_ms is not None and time.monotonic() >= arrival_s + limit_ms / 1000

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(stream.prompt.token_ids) for stream in self._prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(stream.num_cached_tokens or 0 for stream in self._prompts)

    def deltas(self) -> Iterator[tuple[Choice, CompletionOutput]]:
        """Yield each choice that has something new, with what that is."""
        for choice in self.choices:
            if (delta := choice.delta()) is not None:
                yield choice, delta

    def wake(self) -> None:
        self.was_woken = True
        self._changed.set()

    def cut_short(self) -> None:
        """End the call as the server ends: it does not wait for the engine to end its streams."""
        self.was_cut = not (self.finished or self.has_begun)
        self.wake()

    def disconnect(self) -> None:
        """Report that its client has disconnected."""
        self.is_disconnected = True
        self._changed.set()

    async def wait(self) -> None:
        """Until something has come, its client has disconnected, or a comment is due. All that wakes it has a deadline
        of its own."""
        await self._changed.wait()
        self._changed.clear()
