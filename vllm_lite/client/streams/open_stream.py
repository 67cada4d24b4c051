"""OpenStream: a session's state of an open request: its sink, and all tokens that were delivered. That is enough to
start the request again in another engine, where it continues after the delivered tokens.

OpenStreams: the open requests of one session, and those that it dropped before their ends arrived. It turns outputs of
the engine into events of their sinks. Each stream gets its end here in any case: from an output, from `take_ended`
while there is no engine, or from `end_all`.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

import msgspec

from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import EngineDeadError, ProtocolError, RequestError
from vllm_lite.protocol.api import Abort, Finished, ForkRequest, Generate, SampleSoFar, Tokens

Sink = Callable[[list[Event]], None]
"""Called with the events of one message, for all streams that share the sink. It runs on the session's thread and must
not block."""


class OpenStream:
    """An open request. `tokens` has the delivered output of each sample that has not ended."""

    __slots__ = (
        *("_deadline_ms", "_known_from", "_num_scored", "_started_s"),
        *("aborted", "num_moves", "request", "sink", "tokens"),
    )

    def __init__(self, message: Generate | ForkRequest, sink: Sink, own: Generate | None = None) -> None:
        """`own` is the Generate that replaces a ForkRequest; a fork without it is not started again."""
        self.sink = sink
        self.aborted: set[int] = set()
        """Samples that were aborted."""
        self.num_moves = 0
        """Number of times that it moved to another session."""
        self._started_s = monotonic()
        self._deadline_ms = message.params.deadline_ms
        if isinstance(message, Generate):
            self.request: Generate | None = message
            """The message that starts it, None if it cannot be started again."""
        elif own is not None:
            named = {"external_id": message.external_id, "context": message.context}
            self.request = msgspec.structs.replace(own, request_id=message.child_id, params=message.params, **named)
        else:
            self.request = None
        request = self.request
        self._num_scored = 0 if request is None else request.num_scored
        if request is not None and request.samples:
            self.tokens = {sample.index: array("I", sample.output) for sample in request.samples}
        else:
            output = b"" if request is None else request.output
            self.tokens = {index: array("I", output) for index in range(message.params.n)}
        has_output = request is not None and (request.samples or request.output)
        self._known_from = 0 if has_output else message.have
        """Index of the first output token that is known here; the sink has the earlier ones."""

    def abort(self, samples: Iterable[int] = ()) -> list[int] | None:
        """Record the abort of `samples` (empty: all). Returns those of them that are open; None if there is nothing to
        abort."""
        named = [sample for sample in samples if sample in self.tokens]
        if samples and not named:
            return None
        request = self.request
        if not named or len(named) == len(self.tokens):
            self.aborted.update(self.tokens)
        elif request is None or not request.params.use_beam_search:  # beams end together only
            self.aborted.update(named)
        return named

    def take(self, output: Tokens | Finished) -> Event | None:
        """Turn an output of the engine into the sink's next event. None: the sample has ended already."""
        event: Event = output
        if isinstance(output, Finished) and output.reason == "error":
            self.tokens.clear()  # an error ends all samples, whatever its index
            return event
        if (tokens := self.tokens.get(output.index)) is None:
            return None
        have = self._known_from + len(tokens)
        if output.start != have:
            event = _undelivered(output, have)
        if output.prompt is not None:
            self._num_scored = max(self._num_scored, output.prompt.start + len(output.prompt.entries))
        if isinstance(output, Finished):
            del self.tokens[output.index]
        elif isinstance(event, Tokens):
            try:
                tokens.extend(event.token_ids)
            except (OverflowError, TypeError) as error:
                return StreamFailure(
                    output.request_id, ProtocolError(f"the engine sent something that is not a token: {error}")
                )
        return event

    def end_here(self, request_id: str) -> list[Event]:
        """The ends of aborted samples, or of a request past its deadline, for a session without an engine to send
        them."""
        aborted = sorted(self.aborted & self.tokens.keys())
        self.aborted.clear()
        ends: list[Event] = [Finished(request_id, self._pop(sample), [], "abort", index=sample) for sample in aborted]
        if self.tokens and (left_ms := self._left_ms()) is not None and left_ms <= 0:
            sample, late = min(self.tokens), f"the deadline of {self._deadline_ms} ms passed"
            ends.append(Finished(request_id, self._pop(sample), [], "error", error=late, index=sample))
            self.tokens.clear()  # an error ends all samples
        return ends

    def _left_ms(self) -> int | None:
        """Milliseconds left until the deadline, None without one."""
        return None if self._deadline_ms is None else self._deadline_ms - int(1000 * (monotonic() - self._started_s))

    def _pop(self, sample: int) -> int:
        return self._known_from + len(self.tokens.pop(sample))

    def again(self, request_id: str) -> Generate | Event:
        """The message that starts this request in an engine that does not know it, or its failure."""
        request = self.request
        if request is None or self._known_from:
            missing = "its prompt and the tokens it began with are not known here"
            return StreamFailure(
                request_id, EngineDeadError(f"request {request_id!r} cannot be started again: {missing}")
            )
        params, left_ms = request.params, self._left_ms()
        if left_ms is not None:
            params = msgspec.structs.replace(params, deadline_ms=max(1, left_ms))
        plain = {"params": params, "have": 0, "output": b"", "samples": (), "num_scored": self._num_scored}
        request = msgspec.structs.replace(request, **plain)
        if params.use_beam_search:  # nothing has been delivered yet: the search starts again
            return request
        if params.n == 1:
            tokens = self.tokens[0]
            return msgspec.structs.replace(request, have=len(tokens), output=tokens.tobytes())
        if len(self.tokens) == params.n and not any(self.tokens.values()):
            return request
        samples = tuple(SampleSoFar(index, tokens.tobytes()) for index, tokens in sorted(self.tokens.items()))
        return msgspec.structs.replace(request, samples=samples)


def _undelivered(output: Tokens | Finished, have: int) -> Tokens | Finished | StreamFailure:
    """Remove the tokens of `output` that were delivered before. A gap before `output` is a StreamFailure."""
    if output.start > have:
        missing = f"tokens {have} to {output.start - 1} of request {output.request_id!r} did not arrive"
        return StreamFailure(output.request_id, ProtocolError(missing))
    known = have - output.start
    logprobs = None if output.logprobs is None else output.logprobs[known:]
    return msgspec.structs.replace(output, start=have, token_ids=output.token_ids[known:], logprobs=logprobs)


def by_sink(pairs: Iterable[tuple[OpenStream, Sequence[Event]]]) -> dict[Sink, list[Event]]:
    """Join the events of all streams that share a sink."""
    events: dict[Sink, list[Event]] = {}
    for stream, its_events in pairs:
        if its_events:
            events.setdefault(stream.sink, []).extend(its_events)
    return events


Ended = list[tuple[OpenStream, list[Event]]]
"""Streams with the events that end them, or end samples of them."""


class OpenStreams:
    """The open streams of one session, which calls this under its lock and sends the messages that it returns."""

    def __init__(self) -> None:
        self._open: dict[str, OpenStream] = {}
        self._dropped: dict[str, deque[set[int]]] = {}
        """Request id -> per dropped stream, oldest first, the samples whose Finished the engine has still to send. The
        id may be reused before that."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __getitem__(self, request_id: str) -> OpenStream:
        return self._open[request_id]

    def add(self, request_id: str, stream: OpenStream) -> None:
        """Add a stream. Raises RequestError if one with this id is open."""
        if request_id in self._open:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        self._open[request_id] = stream

    def of_sink(self, sink: Sink) -> list[str]:
        """Request ids of the streams that this sink reads."""
        return [name for name, stream in list(self._open.items()) if stream.sink == sink]

    # ---- ends requested by the client

    def abort(self, request_id: str, samples: Sequence[int], *, stopped: bool) -> Abort | None:
        """The message that aborts a request or some samples; None if there is nothing to abort."""
        stream = self._open.get(request_id)
        named = None if stream is None else stream.abort(samples)
        return None if named is None else Abort(request_id, stopped, tuple(named))

    def aborts(self) -> list[Abort]:
        return [Abort(request_id) for request_id in self._open]

    def drop(self, request_id: str, *, stopped: bool, has_engine: bool) -> list[Abort]:
        """Drop a stream, and return the Abort for the engine, if there is one, which will still send the samples'
        ends."""
        stream = self._open.pop(request_id, None)
        if stream is None or not has_engine:
            return []
        self._dropped.setdefault(request_id, deque()).append(set(stream.tokens))
        return [Abort(request_id, stopped)]

    # ---- outputs of the engine

    def take(
        self, outputs: Iterable[Tokens | Finished], *, has_engine: bool
    ) -> tuple[dict[Sink, list[Event]], list[Abort]]:
        """Turn outputs into the events of each sink. Also returns Aborts for streams that ended with an error here."""
        events: dict[Sink, list[Event]] = {}
        aborts: list[Abort] = []
        for output in outputs:
            if output.request_id in self._dropped:
                self._count_end(output)
                continue
            stream = self._open.get(output.request_id)
            event = None if stream is None else stream.take(output)
            if stream is None or event is None:
                continue
            if not stream.tokens:
                del self._open[output.request_id]
            elif isinstance(event, StreamFailure):
                aborts += self.drop(output.request_id, stopped=False, has_engine=has_engine)
            events.setdefault(stream.sink, []).append(event)
        return events, aborts

    def _count_end(self, output: Tokens | Finished) -> None:
        """Remove an end of the oldest dropped stream with this id. After the last one the id belongs to the next
        stream."""
        if not isinstance(output, Finished):
            return
        streams = self._dropped[output.request_id]
        streams[0].discard(output.index)
        if not streams[0] or output.reason == "error":
            streams.popleft()
            if not streams:
                del self._dropped[output.request_id]

    # ---- without an engine

    def forget_dropped(self) -> None:
        """Forget the dropped streams: a lost engine sends no more ends."""
        self._dropped.clear()

    def take_ended(self) -> Ended:
        """Take the ends of aborted samples, and of streams past their deadline."""
        ended: Ended = []
        for request_id, stream in list(self._open.items()):
            if events := stream.end_here(request_id):
                ended.append((stream, events))
                if not stream.tokens:
                    del self._open[request_id]
        return ended

    def again(self) -> tuple[list[Generate], Ended]:
        """The messages that start all open streams in another engine, in the order of submission, and the ends of those
        that cannot continue."""
        ended, messages = self.take_ended(), list[Generate]()
        for request_id, stream in list(self._open.items()):
            again = stream.again(request_id)
            if isinstance(again, Generate):
                messages.append(again)
            else:
                del self._open[request_id]
                ended.append((stream, [again]))
        return messages, ended

    def release(self, max_moves: int) -> dict[str, OpenStream]:
        """Remove and return the streams that have moved fewer than `max_moves` times."""
        streams = {name: stream for name, stream in self._open.items() if stream.num_moves < max_moves}
        self._open = {name: stream for name, stream in self._open.items() if name not in streams}
        return streams

    def end_all(self) -> dict[str, OpenStream]:
        streams, self._open = self._open, {}
        return streams
