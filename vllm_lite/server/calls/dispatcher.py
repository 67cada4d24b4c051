"""Dispatcher: delivers the engine's events from the session's thread to the calls of this event loop.

Each message of the engine crosses from thread to loop once, however many streams it is for, and wakes a call with
several streams once.
"""

import asyncio

from vllm_lite.client.engines.any_session import AnySession
from vllm_lite.client.streams.stream import Event, StreamFailure, shows
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.api import Tokens
from vllm_lite.runtime import log
from vllm_lite.server.calls.call import AnyStream, StreamsCall

CHUNK_S = 0.0002
"""Seconds between two chunks of a stream, per running stream: writing all chunks then takes about a fifth of a core."""
MIN_PAUSE_S = 0.004
"""Shorter pauses are not worth a timer: the engine itself gathers tokens for this long."""
MAX_PAUSE_S = 0.05

logger = log.get(__name__)


class Throttle:
    """Wakes calls for new tokens, less often the more streams there are. Every method is called on the loop.

    Sending a chunk takes about 40 us of a core whatever its size, mostly in the system call. Sent as fast as tokens
    arrive, the chunks of many streams would take the time in which the model computes tokens.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[StreamsCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, call: StreamsCall, num_streams: int, *, at_once: bool) -> None:
        """Schedule the wake-up of `call` for new output; there are `num_streams` streams. A call's first output is
        never delayed."""
        pause_s = min(num_streams * CHUNK_S, MAX_PAUSE_S)
        if at_once or not call.was_woken or pause_s < MIN_PAUSE_S:
            self._waiting.pop(call, None)
            call.wake()
            return
        self._waiting[call] = None
        if self._timer is None:
            self._timer = self._loop.call_later(pause_s, self._wake_all)

    def forget(self, call: StreamsCall) -> None:
        self._waiting.pop(call, None)

    def _wake_all(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.wake()


class Dispatcher:
    """Holds all streams of one session and delivers their events. Every method is called on the loop."""

    def __init__(self, session: AnySession, loop: asyncio.AbstractEventLoop) -> None:
        self.session = session
        self._loop = loop
        self._throttle = Throttle(loop)
        self._streams: dict[str, tuple[AnyStream, StreamsCall]] = {}
        self.num_sequences = 0
        """Number of sequences of the running streams."""
        self.num_queued_tokens = 0
        """Number of prompt tokens of the streams without a first token."""
        self._queued: dict[str, int] = {}

    def start(self, call: StreamsCall) -> None:
        """Submit all streams of `call`, or none. Raises RequestError for an id in use, EngineError if the engine
        died."""
        try:
            for index in range(len(call.streams)):
                self.add(call, index)
        except BaseException:
            self.drop(call)
            raise

    def add(self, call: StreamsCall, index: int) -> None:
        """Submit stream `index` of `call`. Raises as start() does."""
        stream = call.streams[index]
        self.session.submit(call.message(index), self._receive, stream.own_message(), call.affinity)
        self._streams[stream.request_id] = stream, call
        if not stream.num_tokens:  # a fork starts with tokens, and its prompt is computed
            self._queued[stream.request_id] = len(stream.prompt.token_ids)
            self.num_queued_tokens += len(stream.prompt.token_ids)
        self.num_sequences += len(stream.samples)

    def has_one_of(self, call: StreamsCall) -> bool:
        """Whether another call already has a stream with an id of this one's: streams of a list are named
        NAME-INDEX."""
        return any(stream.request_id in self._streams for stream in call.streams)

    def drop(self, call: StreamsCall) -> None:
        """Forget `call`, which is over. Its streams that still run are aborted in the engine."""
        self._throttle.forget(call)
        for stream in call.streams:
            if self._streams.get(stream.request_id, (None, None))[1] is call:
                self._forget(stream)

    def abort(self, call: StreamsCall) -> None:
        """Abort `call` in the engine; its streams end with the engine's answer."""
        for stream in call.streams:
            self.session.abort(stream.request_id)

    def _receive(self, events: list[Event]) -> None:
        """Hand events to the loop. Called on the session's thread."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        woken: dict[StreamsCall, bool] = {}  # value: whether the wake-up must not be delayed
        for event in events:
            stream, call = self._streams.get(event.request_id, (None, None))
            if stream is None or call is None:
                continue
            try:
                if stream.starts_again(event, self.session.is_live):
                    self.session.submit(call.message(call.streams.index(stream)), self._receive)
                else:
                    stream.apply(event)
            except Exception as error:  # only this stream fails; the events of others are still dispatched
                logger.exception("request %s failed", event.request_id)
                stream.apply(StreamFailure(event.request_id, VllmLiteError(f"the server failed: {error!r}")))
            if event.request_id in self._queued and shows(event):
                self._leave_queue(event.request_id)
            if stream.finished:  # perhaps at a stop string, which the engine does not know
                self._forget(stream)
            else:
                stream.settle(self.session)
            woken[call] = woken.get(call, False) or not isinstance(event, Tokens) or stream.finished
        for call, at_once in woken.items():
            self._throttle.wake(call, self.num_sequences, at_once=at_once)

    def _forget(self, stream: AnyStream) -> None:
        """Forget a stream, and abort it in the engine if it still runs there."""
        del self._streams[stream.request_id]
        self._leave_queue(stream.request_id)
        self.num_sequences -= len(stream.samples)
        self.session.drop(stream.request_id, stopped=stream.finished and stream.error is None)

    def _leave_queue(self, request_id: str) -> None:
        self.num_queued_tokens -= self._queued.pop(request_id, 0)
