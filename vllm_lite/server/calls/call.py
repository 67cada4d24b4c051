"""Call: one HTTP request that generates. Its streams (one for each prompt), and how much of them has been told."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.sample import Cursor
from vllm_lite.client.stream import RequestStream
from vllm_lite.errors import VllmLiteError

if TYPE_CHECKING:
    from vllm_lite.server.openai.answers import Shape
    from vllm_lite.server.openai.bodies import ForkBody


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
    """Woken whenever one of its streams has news."""

    def __init__(self, call_id: str, streams: Sequence[RequestStream], *, are_forks: bool = False) -> None:
        """`streams` have the same number of samples each; `are_forks` of one request, whose prompt counts once."""
        self.id = call_id
        self.created = int(time.time())
        self.streams = streams
        self._prompts = streams[:1] if are_forks else streams
        self._num_inherited = self._num_tokens
        num = streams[0].params.n
        self.choices = [
            Choice(place * num + sample, stream, sample)
            for place, stream in enumerate(streams)
            for sample in range(num)
        ]
        self.gone = False
        self.was_cut = False
        """The server ends before this had a single token of its own."""
        self.quiet_since_s = time.monotonic()
        self.shape_fork: Callable[[Call, ForkBody], Shape]
        """How a fork of this call is told: as it is itself. Set by whoever tells it."""
        self.was_woken = False
        self._news = asyncio.Event()

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
        """What the first stream that failed ended with."""
        return next((stream.error for stream in self.streams if stream.error is not None), None)

    @property
    def is_late(self) -> bool:
        """Its `deadline_ms` has passed."""
        limit_ms, arrival_s = self.streams[0].params.deadline_ms, self.streams[0].metrics.arrival_time
        return limit_ms is not None and time.monotonic() >= arrival_s + limit_ms / 1000

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(stream.prompt.token_ids) for stream in self._prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(stream.num_cached_tokens or 0 for stream in self._prompts)

    def news(self) -> Iterator[tuple[Choice, CompletionOutput]]:
        """Each choice that has something new, with it."""
        for choice in self.choices:
            if (news := choice.delta()) is not None:
                yield choice, news

    def wake(self) -> None:
        self.was_woken = True
        self._news.set()

    def cut_short(self) -> None:
        """The server ends, and nobody need wait for the engine to know it."""
        self.was_cut = not (self.finished or self.has_begun)
        self.wake()

    def leave(self) -> None:
        """Its client has gone."""
        self.gone = True
        self._news.set()

    async def wait(self) -> None:
        """Until something has come, its client has gone, or a comment is due. Whoever wakes it has a deadline."""
        await self._news.wait()
        self._news.clear()
