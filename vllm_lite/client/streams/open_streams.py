"""OpenStreams: the open requests of one session, and those that it dropped before their ends arrived.

It turns outputs of the engine into events of their sinks. Each stream gets its end here in any case: from an output,
from `take_ended` while there is no engine, or from `end_all`.
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
        """The messages that abort all requests."""
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
        """Remove and return all streams."""
        streams, self._open = self._open, {}
        return streams
