"""OpenStreams: the requests of one session that have not ended, and those that it dropped before their end came.

Outputs of the engine become the events of their sinks. Whatever becomes of the engine, each stream gets its end here:
from what the engine sends, from `take_ended` while there is none, or from `end_all`.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from vllm_lite.client.streams.open_stream import OpenStream, Sink
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Abort, Finished, Generate, Tokens

Ended = list[tuple[OpenStream, list[Event]]]
"""Streams with the events that end them, or end samples of them."""


class OpenStreams:
    """Not thread-safe: the session calls it under its lock, and sends the messages that it returns."""

    def __init__(self) -> None:
        self._open: dict[str, OpenStream] = {}
        self._dropped: dict[str, deque[set[int]]] = {}
        """Streams that were dropped here, oldest first: the samples whose Finished is still to come from the engine. An
        id may be used again before that."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __getitem__(self, request_id: str) -> OpenStream:
        return self._open[request_id]

    def add(self, request_id: str, stream: OpenStream) -> None:
        """Raises RequestError if a stream of this id is open."""
        if request_id in self._open:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        self._open[request_id] = stream

    def of_sink(self, sink: Sink) -> list[str]:
        """The ids of the streams that this sink reads."""
        return [name for name, stream in list(self._open.items()) if stream.sink == sink]

    # ---- ends that are asked for here

    def abort(self, request_id: str, samples: Sequence[int], *, stopped: bool) -> Abort | None:
        """Return the message that asks for the end of a request or of some samples; None if there is nothing to end."""
        stream = self._open.get(request_id)
        named = None if stream is None else stream.abort(samples)
        return None if named is None else Abort(request_id, stopped, tuple(named))

    def aborts(self) -> list[Abort]:
        """Return the messages that ask for the end of all."""
        return [Abort(request_id) for request_id in self._open]

    def drop(self, request_id: str, *, stopped: bool, has_engine: bool) -> list[Abort]:
        """Forget a stream, and return the message for the engine, if there is one: it will still send the samples'
        ends."""
        stream = self._open.pop(request_id, None)
        if stream is None or not has_engine:
            return []
        self._dropped.setdefault(request_id, deque()).append(set(stream.tokens))
        return [Abort(request_id, stopped)]

    # ---- what the engine sends

    def take(
        self, outputs: Iterable[Tokens | Finished], *, has_engine: bool
    ) -> tuple[dict[Sink, list[Event]], list[Abort]]:
        """Return the events of each sink, and messages for what the engine still computes of streams that end."""
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
        """Count off the ends of the oldest dropped stream with this id. After its last one the id means the next
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
        """The engine is lost, and sends no more ends."""
        self._dropped.clear()

    def take_ended(self) -> Ended:
        """Return the ends of what was aborted, and of what passed its deadline."""
        ended: Ended = []
        for request_id, stream in list(self._open.items()):
            if events := stream.end_here(request_id):
                ended.append((stream, events))
                if not stream.tokens:
                    del self._open[request_id]
        return ended

    def again(self) -> tuple[list[Generate], Ended]:
        """Return the messages that start what has not ended in another engine, in the order in which it was submitted,
        and the ends of what cannot go on."""
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
        """Give up the streams that were in fewer than `max_moves` other sessions."""
        streams = {name: stream for name, stream in self._open.items() if stream.num_moves < max_moves}
        self._open = {name: stream for name, stream in self._open.items() if name not in streams}
        return streams

    def end_all(self) -> dict[str, OpenStream]:
        """Give up all streams."""
        streams, self._open = self._open, {}
        return streams
