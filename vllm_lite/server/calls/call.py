"""Call: one HTTP request that generates. It has one stream for each prompt, and a choice for each sample of these."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.pooling import PoolingStream
from vllm_lite.client.streams.sample import Cursor
from vllm_lite.client.streams.stream import RequestStream
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.api import MAX_CONTEXT_BYTES, ForkRequest, Generate
from vllm_lite.server.calls.place import Shown, StreamPosition
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.http.auth import name_of

MAX_ECHO_CHARS = (MAX_CONTEXT_BYTES - 4096) // 4
MAX_STYLE_BYTES = MAX_CONTEXT_BYTES - 4096
"""Limits on the echo and on the encoded style in a CallContext. A longer echo is left out: forks that another server
makes are then answered without it. Of larger tools only the names are kept: their calls are then parsed as if the
arguments had no types."""


class CallContext(msgspec.Struct, frozen=True):
    """Facts about a call, beside its tokens, that any API server may need: the engine keeps them with each stream.
    `index` is the stream's among `num_streams`, which either `are_forks` of one request or have a prompt each. `owner`
    identifies the API key that started the call, "" without keys."""

    created: int
    index: int
    num_streams: int
    are_forks: bool
    style: AnswerStyle
    owner: str = ""


class Choice:
    """One continuation of one prompt, as a choice of the answer. `delta()` delivers each part of it once."""

    __slots__ = ("_cursor", "_rank", "_sample_index", "index", "stream")

    def __init__(self, index: int, stream: RequestStream, sample_index: int, shown: Shown) -> None:
        """`sample_index` is the sample within the stream, or its rank if samples are ranked at the end. `shown` is the
        part delivered to the client before."""
        self.index = index
        self.stream = stream
        self._sample_index = sample_index
        self._cursor: Cursor | None = None
        self._rank: int | None = None
        if stream.ends_at_once:
            self._rank = None if shown.has_ended else sample_index
        else:
            sample = stream.samples[sample_index]
            self._cursor = Cursor(sample_index, sample, shown.num_tokens, shown.num_chars, has_ended=shown.has_ended)

    def part(self, shown: Shown) -> CompletionOutput:
        """The sample's output after the part that the client has been shown."""
        if self.stream.ends_at_once:
            return self.stream.output().outputs[self._sample_index]
        sample = self.stream.samples[self._sample_index]
        found = sample.part(self._sample_index, shown.num_tokens, shown.num_chars)
        found.finish_reason = sample.finish_reason if shown.has_ended else None
        return found

    def delta(self) -> CompletionOutput | None:
        """Output since the last call of delta(), None if there is none. An error is not reported here: it ends the
        whole call."""
        if self._cursor is not None:
            return self._cursor.delta()
        if self._rank is None or not self.stream.finished:
            return None
        rank, self._rank = self._rank, None
        return self.stream.output().outputs[rank]


class Reading:
    """One client's reading of a call: the part of each choice that it has received, and the event that wakes its
    response."""

    def __init__(self, choices: Sequence[Choice], *, is_resumed: bool = False) -> None:
        """`is_resumed`: an earlier connection, which broke, has read a part of the call."""
        self.choices = choices
        self.is_resumed = is_resumed
        self.is_over = False
        """The client has disconnected, or a newer connection has replaced it (`is_replaced`)."""
        self.is_replaced = False
        self.is_complete = False
        """All of the answer has been sent."""
        self.sent_s = time.monotonic()
        """Time at which the client was last sent something."""
        self._changed = asyncio.Event()

    def deltas(self) -> Iterator[tuple[Choice, CompletionOutput]]:
        """Yield each choice that has new output, with that output."""
        for choice in self.choices:
            if (delta := choice.delta()) is not None:
                yield choice, delta

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        """Report that the client has disconnected."""
        self.is_over = True
        self._changed.set()

    def replace(self) -> None:
        """End this reading because a newer connection reads the call, perhaps at another server."""
        self.is_replaced = True
        self.end()

    async def wait(self) -> None:
        """Wait for new output, the end of the reading, or a due comment. Each of these has a deadline of its own."""
        await self._changed.wait()
        self._changed.clear()


AnyStream = RequestStream | PoolingStream


class StreamsCall(ABC):
    """The streams of one HTTP request under one name; the dispatcher wakes it when one of them has new output."""

    streams: Sequence[AnyStream]

    def __init__(self, call_id: str, style: AnswerStyle, owner: str) -> None:
        self.id = call_id
        self.owner = owner
        """As in CallContext."""
        self.name = name_of(call_id, owner)
        """Name under which the servers and the engine keep the call; clients know its id."""
        self.affinity: str | None = None
        """Session that the client has named: all calls of a session go to the same one of several engines."""
        self.created = int(time.time())
        self.style = style
        self.was_cut = False
        """The server shut down before the call had generated a token."""
        self.was_woken = False

    @abstractmethod
    def context(self, index: int) -> CallContext:
        """The context of stream `index`."""

    def message(self, index: int) -> Generate | ForkRequest:
        """The message that starts stream `index` in the engine, where any API server finds it by the call's name."""
        context = msgspec.msgpack.encode(self.context(index))
        return msgspec.structs.replace(self.streams[index].message(), external_id=self.name, context=context)

    @abstractmethod
    def wake(self) -> None:
        """Let the response see new output."""

    @property
    def error(self) -> VllmLiteError | None:
        """The error of the first stream that failed, which fails the call."""
        return next((stream.error for stream in self.streams if stream.error is not None), None)


class Call(StreamsCall):
    """One HTTP request that generates."""

    streams: Sequence[RequestStream]

    def __init__(
        self,
        call_id: str,
        streams: Sequence[RequestStream],
        style: AnswerStyle,
        *,
        owner: str = "",
        are_forks: bool = False,
        num_inherited: int | None = None,
    ) -> None:
        """`streams` have the same number of samples each; if they `are_forks` of one request, its prompt counts once.
        `num_inherited` of their current tokens were generated by that request; None: all of them."""
        super().__init__(call_id, style, owner)
        self.streams = streams
        self.are_forks = are_forks
        self._prompts = streams[:1] if are_forks else streams
        self._num_inherited = self._num_tokens if num_inherited is None else num_inherited
        self.reading = Reading(self._choices(StreamPosition.beginning(len(streams) * streams[0].params.n)))

    def context(self, index: int) -> CallContext:
        style, count = self.style, len(self.streams)
        if style.echo and (count > 1 or len(style.echo[0]) > MAX_ECHO_CHARS):
            # Only a call with one stream can be forked or resumed, and a resumed one must have the same echo.
            style = msgspec.structs.replace(style, echo=(), resumable=False)
        if style.parsing is not None and len(msgspec.msgpack.encode(style)) > MAX_STYLE_BYTES:
            parsing = msgspec.structs.replace(style.parsing, tools=_named_only(style.parsing.tools))
            style = msgspec.structs.replace(style, parsing=parsing, resumable=False)
        return CallContext(self.created, index, count, self.are_forks, style, self.owner)

    @property
    def choices(self) -> Sequence[Choice]:
        return self.reading.choices

    @property
    def finished(self) -> bool:
        return all(stream.finished for stream in self.streams)

    @property
    def has_ended(self) -> bool:
        """Whether the call is complete: all streams have finished, or one has failed, which fails the call."""
        return self.finished or self.error is not None

    @property
    def has_begun(self) -> bool:
        """Whether the call has generated a token itself. A fork starts with its parent's tokens, which do not count."""
        return self._num_tokens > self._num_inherited

    @property
    def num_sequences(self) -> int:
        """Number of samples over all prompts; the engine computes each as a sequence."""
        return sum(len(stream.samples) for stream in self.streams)

    @property
    def _num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def is_late(self) -> bool:
        """Whether the call's `deadline_ms` has passed."""
        limit_ms, arrival_s = self.streams[0].params.deadline_ms, self.streams[0].metrics.arrival_time
        return limit_ms is not None and time.monotonic() >= arrival_s + limit_ms / 1000

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(stream.prompt.token_ids) for stream in self._prompts)

    @property
    def num_image_tokens(self) -> int:
        """Tokens of the prompts that stand for images."""
        return sum(medium.num_tokens for stream in self._prompts for medium in stream.prompt.media)

    @property
    def num_cached_tokens(self) -> int:
        return sum(stream.num_cached_tokens or 0 for stream in self._prompts)

    def read_on(self, place: StreamPosition) -> Reading:
        """Let another connection read the call from `place` on, and end the current reading."""
        self.reading.replace()
        self.reading = Reading(self._choices(place), is_resumed=True)
        self.reading.wake()
        return self.reading

    def has_reached(self, place: StreamPosition) -> bool:
        """Whether every choice has at least the output that, by `place`, a client has received."""
        if len(place.choices) != len(self.choices):
            return False
        if place.closing and self.error is None and not all(shown.has_ended for shown in place.choices):
            return False
        num = self.streams[0].params.n
        return all(
            _has_reached(self.streams[index // num], index % num, shown) for index, shown in enumerate(place.choices)
        )

    def wake(self) -> None:
        self.was_woken = True
        self.reading.wake()

    def cut_short(self) -> None:
        """End the call at shutdown, without waiting for the engine to end its streams."""
        self.was_cut = not (self.finished or self.has_begun)
        self.wake()

    def _choices(self, place: StreamPosition) -> list[Choice]:
        num = self.streams[0].params.n
        return [
            Choice(index, self.streams[index // num], index % num, shown) for index, shown in enumerate(place.choices)
        ]


def _named_only(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the tools with their names only, which are short."""
    return tuple({"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools)


def _has_reached(stream: RequestStream, sample_index: int, shown: Shown) -> bool:
    """Whether a sample has at least the `shown` output; a sample that is ranked at the end has all or nothing."""
    told = shown.num_tokens, shown.num_chars
    if stream.ends_at_once:
        if not shown.has_ended:
            return told == (0, 0)
        if not stream.finished or stream.error is not None:
            return False
        output = stream.output().outputs[sample_index]
        return told == (len(output.token_ids), len(output.text))
    sample = stream.samples[sample_index]
    if shown.has_ended:
        return sample.finish_reason not in (None, "error") and told == (len(sample.token_ids), len(sample.text))
    return shown.num_tokens <= len(sample.token_ids) and shown.num_chars <= len(sample.text)
