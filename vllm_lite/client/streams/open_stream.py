"""OpenStream: a session's state of an open request: its sink, and all tokens that were delivered.

That is enough to start the request again in another engine, where it continues after the delivered tokens.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

import msgspec

from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import EngineDeadError, ProtocolError
from vllm_lite.protocol.api import Finished, ForkRequest, Generate, SampleSoFar, Tokens

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
