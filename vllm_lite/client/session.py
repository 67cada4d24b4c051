"""Session: one connection to one engine, and the one thread that owns it.

Other threads append their messages to a deque and wake that thread. It calls their sinks with the outputs of the
engine, once for each message and sink. Every submitted stream ends in one of three ways: with one Finished for each of
its samples, with one Finished that carries an error, or with one Failure.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from vllm_lite import transport
from vllm_lite.client.stream import Event, Failure
from vllm_lite.errors import EngineDeadError, EngineError, ModelError, ProtocolError, RequestError
from vllm_lite.protocol import PROTOCOL_VERSION, api
from vllm_lite.protocol.api import Finished, ForkRequest, FromClient, Generate, Stats, ToClient, Tokens, Welcome
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.runtime import log
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Connection, Delivery, KeysOption
from vllm_lite.transport.interface import poller

Sink = Callable[[list[Event]], None]
"""Takes the events of one message, for all streams that share the sink. It runs on the session's thread and must not
block."""

DEFAULT_TIMEOUT_S = 60.0
HEARTBEAT_TIMEOUT_S = 30.0
STATS_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
_ALIVE_POLL_S = 0.05
_REASON_S = 0.5
"""How long after an engine's end the session waits for the reason of it."""
_IDLE_POLL_MS = 1000
_BUSY_POLL_MS = 5

_ANSWERS = (Stats, api.Descriptions, api.ExternalAborted, api.PrefixCacheReset)

A = TypeVar("A")
logger = log.get(__name__)


@dataclass(slots=True)
class _OpenStream:
    """A stream that has not ended. `have` maps each sample that has not ended to the number of tokens its sink got."""

    sink: Sink
    have: dict[int, int]


class Session:
    """One connection to an engine. `Session.connect` makes it; every method may be called from any thread."""

    def __init__(
        self,
        connection: Connection,
        welcome: Welcome,
        address: str,
        alive: Callable[[], str | None] | None,
        heartbeat_timeout_s: float,
    ) -> None:
        self.welcome = welcome
        self.address = address
        self.num_malformed = 0
        self._connection = connection
        self._alive = alive
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._last_heard_s = time.monotonic()
        self._wakeup = Wakeup()
        self._closing = False
        self._reported_end: str | None = None  # why the engine ended, from fail()
        # Several threads change what follows, always under the lock.
        self._lock = threading.Lock()
        self._outgoing: deque[FromClient] = deque()
        self._open: dict[str, _OpenStream] = {}
        self._dropped: dict[str, deque[set[int]]] = {}
        """Streams that were dropped here, oldest first: the samples whose Finished is still to come from the engine. An
        id may be used again before that."""
        self._questions: dict[type, deque[Future[Any]]] = {kind: deque() for kind in _ANSWERS}  # answered in order
        self._dead: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="engine session", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        alive: Callable[[], str | None] | None = None,
        keys: KeysOption = None,
    ) -> "Session":
        """Shake hands with the engine at `address`, waiting while it loads.

        A tcp address needs `keys`: the folder of this client's keys, or False for none. `alive()` returns None while
        the engine's process runs, then why it ended. Raises EngineError if the engine refuses (another version or
        model, a failed start, an unknown key), has ended, or does not answer in `timeout_s`; ModelError if it cannot
        start because of its model or configuration; ConfigError for missing keys.
        """
        connection = transport.connect(address, f"client-{os.getpid()}-{os.urandom(8).hex()}".encode(), keys)
        try:
            connection.send(client_to_engine.encode(api.Hello(PROTOCOL_VERSION, model)))
            welcome = _await_welcome(connection, address, timeout_s, alive)
        except BaseException:
            connection.close()
            raise
        return cls(connection, welcome, address, alive, heartbeat_timeout_s)

    @property
    def dead(self) -> EngineError | None:
        """Why nothing can be submitted any more, None as long as it can. A new exception each time."""
        return None if self._dead is None else _copy(self._dead)

    def submit(self, message: Generate | ForkRequest, sink: Sink) -> None:
        """Start a request, whose events go to `sink`. Raises RequestError for an id in use, EngineError if dead."""
        request_id = message.child_id if isinstance(message, ForkRequest) else message.request_id
        with self._lock:
            self._check_usable()
            if request_id in self._open:
                raise RequestError(f"request id {request_id!r} is in use; choose another")
            if not self._open:
                self._last_heard_s = time.monotonic()  # an idle engine was silent with good reason
            self._open[request_id] = _OpenStream(sink, dict.fromkeys(range(message.params.n), message.have))
            self._post(message)

    def is_live(self, request_id: str) -> bool:
        """Whether this request has not ended."""
        with self._lock:
            return request_id in self._open

    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None:
        """Ask the engine to end a request, or some `samples` of it. Their stream ends when the engine says so.

        Unknown ids and samples that have ended are ignored. `stopped`: they are complete, as a stop string was found,
        and the engine counts them as such.
        """
        with self._lock:
            stream = self._open.get(request_id)
            if stream is None:
                return
            named = [sample for sample in samples if sample in stream.have]
            if named or not samples:
                self._post(api.Abort(request_id, stopped, tuple(named)))

    def drop(self, request_id: str, *, stopped: bool = False) -> None:
        """Abort a request at once: its sink gets no more events. `stopped` is as for abort()."""
        with self._lock:
            stream = self._open.pop(request_id, None)
            if stream is not None:
                self._abort_dropped(request_id, stream, stopped=stopped)
                self._wakeup.set()

    def request_stats(self) -> "Future[Stats]":
        """Ask for the engine's counters. The future fails with EngineError if the engine does."""
        return self._ask(api.GetStats(), Stats)

    def describe(
        self, request_ids: Sequence[str] = (), external_id: str = "", *, with_content: bool = False
    ) -> "Future[api.Descriptions]":
        """Ask for the state of live requests, of any client: those with these ids, and all with the external id. The
        future fails with EngineError if the engine does."""
        return self._ask(api.Describe(tuple(request_ids), external_id, with_content), api.Descriptions)

    def abort_external(self, external_id: str) -> "Future[api.ExternalAborted]":
        """Have the engine end all requests, of any client, that have this external id. Fails as describe() does."""
        return self._ask(api.AbortExternal(external_id), api.ExternalAborted)

    def reset_prefix_cache(self) -> "Future[api.PrefixCacheReset]":
        """Have the engine empty its prefix cache. The future fails with EngineError if the engine does."""
        return self._ask(api.ResetPrefixCache(), api.PrefixCacheReset)

    def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> Stats:
        """The engine's counters. Raises EngineError if it does not answer in `timeout_s`."""
        return self.wait(self.request_stats(), timeout_s)

    def wait(self, answer: "Future[A]", timeout_s: float = STATS_TIMEOUT_S) -> A:
        """Wait for an answer. Raises EngineError if it does not come in `timeout_s`."""
        try:
            return answer.result(timeout_s)
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.address} did not answer within {timeout_s:g} s") from error

    def fail(self, reason: str) -> None:
        """Report from outside that the engine has ended, which ends every stream."""
        with self._lock:
            self._reported_end = reason
            self._wakeup.set()

    def close(self) -> None:
        """Abort what is in flight, end its streams, and close the connection."""
        with self._lock:
            self._closing = True
            self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _ask(self, message: FromClient, answer: type[A]) -> "Future[A]":
        future: Future[A] = Future()
        with self._lock:
            self._check_usable()
            self._questions[answer].append(future)
            self._post(message)
        return future

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise _copy(self._dead)

    def _post(self, message: FromClient) -> None:
        self._outgoing.append(message)
        self._wakeup.set()

    # ---- the session's own thread

    def _run(self) -> None:
        try:
            watched = poller(self._connection, self._wakeup)
            while not self._closing and self._dead is None:
                watched.poll(_BUSY_POLL_MS if self._outgoing else _IDLE_POLL_MS)
                self._wakeup.clear()
                self._send_queued()
                self._receive()
                self._check()
            self._leave()
        except Exception as error:
            logger.exception("the session with the engine failed")
            self._die(EngineError(f"the client failed: {error!r}"))
        finally:
            self._connection.close()
            with self._lock:
                self._wakeup.close()

    def _send_queued(self) -> None:
        while self._outgoing:
            if self._connection.send(client_to_engine.encode(self._outgoing[0])) is Delivery.BUSY:
                return
            self._outgoing.popleft()

    def _receive(self) -> None:
        while (payload := self._connection.recv()) is not None:
            self._last_heard_s = time.monotonic()
            try:
                message: ToClient = engine_to_client.decode(payload)
            except ProtocolError as error:
                self.num_malformed += 1
                logger.warning("dropped from the engine (%d so far): %s", self.num_malformed, error)
                continue
            self._handle(message)

    def _handle(self, message: ToClient) -> None:
        if isinstance(message, api.OutputBatch):
            self._dispatch(message.outputs)
        elif isinstance(message, _ANSWERS):
            with self._lock:
                futures = self._questions[type(message)]
                future = futures.popleft() if futures else None
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(message)
        elif isinstance(message, api.Dying):
            self._die(EngineDeadError(message.reason))
        elif isinstance(message, api.Refused):  # it was restarted and does not know this client
            self._die(EngineDeadError(f"the engine at {self.address} was restarted and refused us: {message.reason}"))

    def _check(self) -> None:
        if self._connection.lost() or self._reported_end is not None:
            self._receive()  # what was sent before the end counts
            if self._dead is None:
                self._die(EngineDeadError(f"the engine died: {self._reported_end or self._reason_of_death()}"))
        silent_s = time.monotonic() - self._last_heard_s
        if self._open and silent_s > self._heartbeat_timeout_s:
            self._die(EngineDeadError(f"the engine at {self.address} has been silent for {silent_s:.0f} s"))

    def _reason_of_death(self) -> str:
        """Find out why the connection was lost. The process that watches the engine may know a moment later."""
        deadline_s = time.monotonic() + _REASON_S
        while self._alive is not None and time.monotonic() < deadline_s:
            reason = self._reported_end or self._alive()
            if reason is not None:
                return reason
            time.sleep(0.01)
        return f"it closed its connection at {self.address}"

    def _leave(self) -> None:
        """Abort what runs in the engine and end every stream."""
        with self._lock:
            self._outgoing += [api.Abort(request_id) for request_id in self._open]
        self._send_queued()
        self._die(EngineError("the client was closed"))

    # ---- streams

    def _dispatch(self, outputs: list[Tokens | Finished]) -> None:
        """Call each sink once, with the events that this message holds for it."""
        events: dict[Sink, list[Event]] = {}
        with self._lock:
            for output in outputs:
                if output.request_id in self._dropped:
                    self._count_end(output)
                    continue
                stream = self._open.get(output.request_id)
                event = None if stream is None else self._next_event(output, stream)
                if stream is not None and event is not None:
                    events.setdefault(stream.sink, []).append(event)
        self._deliver(events)

    def _next_event(self, output: Tokens | Finished, stream: _OpenStream) -> Event | None:
        """Make the stream's next event of an output, and close the stream with the last one. None: the sample has ended
        already."""
        event: Event = output
        if isinstance(output, Finished) and output.reason == "error":
            stream.have.clear()  # an error ends all samples, whatever its index
        elif (have := stream.have.get(output.index)) is None:
            return None
        else:
            event = output if output.start == have else _undelivered(output, have)
            if isinstance(output, Finished):
                del stream.have[output.index]
            elif isinstance(event, Tokens):
                stream.have[output.index] = have + len(event.token_ids)
        if not stream.have or isinstance(event, Failure):
            del self._open[output.request_id]
            if stream.have:
                self._abort_dropped(output.request_id, stream)
        return event

    def _abort_dropped(self, request_id: str, stream: _OpenStream, *, stopped: bool = False) -> None:
        """Abort a stream that has no sink any more; needs the lock. The engine will still send its samples' ends."""
        self._dropped.setdefault(request_id, deque()).append(set(stream.have))
        self._outgoing.append(api.Abort(request_id, stopped))

    def _count_end(self, output: Tokens | Finished) -> None:
        """Count off the ends of the oldest dropped stream with this id; needs the lock. After its last one the id means
        the next stream."""
        if not isinstance(output, Finished):
            return
        streams = self._dropped[output.request_id]
        streams[0].discard(output.index)
        if not streams[0] or output.reason == "error":
            streams.popleft()
            if not streams:
                del self._dropped[output.request_id]

    def _deliver(self, events: dict[Sink, list[Event]]) -> None:
        for sink, its_events in events.items():
            try:
                sink(its_events)
            except Exception:  # its event loop is closed, for example: its streams have no reader
                logger.debug("a reader has gone", exc_info=True)
                for request_id in [name for name, stream in list(self._open.items()) if stream.sink == sink]:
                    self.drop(request_id)

    def _die(self, error: EngineError) -> None:
        """End every stream with `error`. Only the first call counts: its reason is the root cause."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            streams, self._open = self._open, {}
            questions = [future for futures in self._questions.values() for future in futures]
        events: dict[Sink, list[Event]] = {}
        for request_id, stream in streams.items():
            events.setdefault(stream.sink, []).append(Failure(request_id, _copy(error)))
        self._deliver(events)
        for future in questions:
            if future.set_running_or_notify_cancel():
                future.set_exception(_copy(error))


def _copy(error: EngineError) -> EngineError:
    """Copy `error` for one raiser: an exception that several threads raise would collect all their tracebacks."""
    return type(error)(str(error))


def _undelivered(output: Tokens | Finished, have: int) -> Tokens | Finished | Failure:
    """Cut off the tokens that were delivered before. A gap between those and `output` is a Failure."""
    if output.start > have:
        missing = f"tokens {have} to {output.start - 1} of request {output.request_id!r} did not arrive"
        return Failure(output.request_id, ProtocolError(missing))
    known = have - output.start
    logprobs = None if output.logprobs is None else output.logprobs[known:]
    return msgspec.structs.replace(output, start=have, token_ids=output.token_ids[known:], logprobs=logprobs)


def _await_welcome(
    connection: Connection, address: str, timeout_s: float, alive: Callable[[], str | None] | None
) -> Welcome:
    deadline_s = time.monotonic() + timeout_s
    while True:
        death = alive() if alive is not None else None  # before reading, as what it sent before its end counts
        welcome = _read_welcome(connection, address)
        if welcome is not None:
            return welcome
        if death is not None:
            _await_refusal(connection, address)
            raise EngineError(f"the engine did not start: {death}")
        refusal = connection.refused()
        if refusal is not None:
            raise EngineError(f"the engine at {address} does not let this client in: {refusal}")
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineError(f"no engine answered at {address} within {timeout_s:g} s")
        transport.wait(min(left_s, _ALIVE_POLL_S), connection)


def _await_refusal(connection: Connection, address: str) -> None:
    """Wait for the Refused that an engine sends before it ends, which may still be on its way. Raises its reason."""
    deadline_s = time.monotonic() + _REASON_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        _read_welcome(connection, address)
        connection.lost()  # clears the event of the loss, which would end the wait below
        transport.wait(left_s, connection)


def _read_welcome(connection: Connection, address: str) -> Welcome | None:
    while (payload := connection.recv()) is not None:
        try:
            message: ToClient = engine_to_client.decode(payload)
        except ProtocolError as error:
            raise EngineError(f"what answers at {address} is not an engine of this version: {error}") from error
        if isinstance(message, Welcome):
            return message
        if isinstance(message, api.Refused):
            raise ModelError(message.reason) if message.bad_input else EngineError(message.reason)
    return None
