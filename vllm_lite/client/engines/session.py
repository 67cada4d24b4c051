"""Session: the connection to one engine and its successors, and the thread that owns it.

Other threads append messages to a deque and wake this thread. It calls their sinks with the engine's outputs, once per
message and sink. Every submitted stream ends in one of three ways: with one Finished per sample, with one Finished that
has an error, or with one StreamFailure.

When the engine is lost, the thread looks for the one that replaces it, and sends it all unfinished requests in the
order of submission: streams pause, and continue after the tokens that their sinks have. With several engines, other
sessions may adopt() them meanwhile (data_parallel.py).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import TypeVar

from vllm_lite.client.engines.any_session import AnySession, Member
from vllm_lite.client.engines.connection import Alive, EngineAddress, EngineSearch, shake_hands
from vllm_lite.client.engines.feature import (
    Answers,
    Handlers,
    KnownAdapters,
    LostWorkers,
    SessionFeature,
    all_handlers,
    copy_of,
)
from vllm_lite.client.engines.link import SessionLink, check_question, encoded
from vllm_lite.client.streams.open_stream import OpenStream, OpenStreams, Sink, by_sink
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import EngineDeadError, EngineError, RequestError
from vllm_lite.protocol import api
from vllm_lite.protocol.adapters import AdapterInfo
from vllm_lite.protocol.api import MAX_ID_CHARS, ForkRequest, FromClient, Generate, ToClient, Welcome
from vllm_lite.runtime import log
from vllm_lite.transport import Connection, KeysOption
from vllm_lite.transport.time_slice import shorten_slice

DEFAULT_TIMEOUT_S = 60.0
HEARTBEAT_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 2.0
MAX_MOVES = 3
"""Maximum number of other engines in which a stream continues: a request that kills engines must not kill all."""

_OF_AN_EPOCH = (api.OutputBatch, api.Heartbeat, api.Recovering, api.Recovered)

A = TypeVar("A")
logger = log.get(__name__)


class Session(AnySession):
    """A client's session with an engine. Created by Session.connect; all methods may be called from any thread."""

    def __init__(
        self,
        connection: Connection,
        welcome: Welcome,
        place: EngineAddress,
        *,
        alive: Alive | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        recovery_timeout_s: float = RECOVERY_TIMEOUT_S,
    ) -> None:
        self._welcome = welcome
        self.address = place.address
        self.on_change: Callable[[Session], None] = lambda _: None
        """Called on any thread, without a lock, when the engine or its workers were lost, and when they serve again."""
        self._place = place
        self.link = SessionLink(connection, alive)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._closing = False
        self._lost: str | None = None
        """Reason why there is no engine at present, while the thread looks for another one."""
        # Several threads change the following, always under the lock.
        self._lock = threading.RLock()  # reentrant: a signal handler or the garbage collector may call close()
        self._streams = OpenStreams()
        self._answers = Answers()
        self._adapters = KnownAdapters(welcome.adapters)
        self._workers = LostWorkers(lambda: self.on_change(self))
        self._features: tuple[SessionFeature, ...] = (self._adapters, self._answers, self._workers)
        own: Handlers = {api.OutputBatch: self._on_outputs, api.Dying: self._on_dying, api.Refused: self._on_refused}
        self._handlers = all_handlers(self._features, own)
        self._dead: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="engine session", daemon=True)
        self._thread.start()

    @classmethod
    def connect(  # noqa: PLR0913 - all but the first have defaults
        cls,
        address: str,
        *,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        recovery_timeout_s: float = RECOVERY_TIMEOUT_S,
        alive: Alive | None = None,
        keys: KeysOption = None,
    ) -> "Session":
        """Connect to the engine at `address`, waiting while it loads.

        A tcp address needs `keys`: the folder of this client's keys, or False for none. An engine that dies later, or
        is silent for `heartbeat_timeout_s` with open requests, may be replaced by another one, which has to be ready
        within `recovery_timeout_s`; 0: its death ends all streams. `alive()` returns None while the engine's process
        runs or is being replaced, then the reason why it ended. Raises EngineError if the engine refuses (another
        version or model, a failed start, an unknown key), has ended, or does not answer within `timeout_s`; ModelError
        if it cannot start because of its model or configuration; ConfigError for missing keys.
        """
        place = EngineAddress(address, keys)
        connection, welcome = shake_hands(place, model, timeout_s, alive)
        timeouts = {"heartbeat_timeout_s": heartbeat_timeout_s, "recovery_timeout_s": recovery_timeout_s}
        return cls(connection, welcome, place, alive=alive, **timeouts)

    @property
    def welcome(self) -> Welcome:
        """The engine's Welcome, or that of the engine that replaced it."""
        return self._welcome

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        return self._adapters.by_name

    @property
    def dead(self) -> EngineError | None:
        return None if self._dead is None else copy_of(self._dead)

    @property
    def recovering(self) -> str | None:
        return self._lost or self._workers.reason

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine that accepts messages, as far as is known."""
        return self._dead is None and self._lost is None

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def num_engines(self) -> int:
        return 1

    def ask_each(self, first_block: int | None = None) -> list[Member]:
        return [self.asked_as(0, first_block)]

    def submit(
        self,
        message: Generate | ForkRequest,
        sink: Sink,
        own: Generate | None = None,
        affinity: str | None = None,  # noqa: ARG002 - it chooses among several engines
    ) -> None:
        """Start a request, whose events go to `sink`; while there is no engine it waits for the next one.

        `own` is the Generate that replaces a ForkRequest in an engine that does not know its parent. Raises
        RequestError for an id in use, EngineError if the session is dead.
        """
        request_id = message.child_id if isinstance(message, ForkRequest) else message.request_id
        if not (isinstance(request_id, str) and 0 < len(request_id) <= MAX_ID_CHARS):
            shown = f"{request_id!r:.80}"
            raise RequestError(f"request_id must be a text of 1 to {MAX_ID_CHARS} characters, got {shown}")
        payload = encoded(message)
        with self._lock:
            self._check_usable()
            self._add(request_id, OpenStream(message, sink, own))
            if self._lost is None:
                self.link.post_encoded(payload)

    def _add(self, request_id: str, stream: OpenStream) -> None:
        if not self._streams:
            self.link.silence.end()  # an idle engine sends nothing
        self._streams.add(request_id, stream)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._streams

    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None:
        """Let the engine end a request, or only its `samples`. Their streams end with the engine's answer.

        Unknown ids and ended samples are ignored. `stopped`: they are complete, because a stop string was found, and
        the engine counts them as such.
        """
        with self._lock:
            message = self._streams.abort(request_id, samples, stopped=stopped)
            if message is not None:
                self._post(message)

    def drop(self, request_id: str, *, stopped: bool = False) -> None:
        """Abort a request at once: its sink gets no more events. `stopped`: see abort()."""
        with self._lock:
            self.link.post(*self._streams.drop(request_id, stopped=stopped, has_engine=self._lost is None))

    def release(self) -> dict[str, OpenStream]:
        """Give up the open streams, if there is no engine for them, so that other sessions may adopt() them."""
        with self._lock:
            if self._lost is None and self._dead is None:
                return {}
            ended = self._streams.take_ended()
            streams = self._streams.release(MAX_MOVES)
        self._deliver(by_sink(ended))
        return streams

    def adopt(self, request_id: str, stream: OpenStream) -> None:
        """Continue a stream that another session has released, in this session's engine or its successor."""
        with self._lock:
            self._check_usable()
            stream.num_moves += 1
            again = stream.again(request_id)
            if isinstance(again, Generate):
                self._add(request_id, stream)
                self._post(again)
        if not isinstance(again, Generate):
            self._deliver({stream.sink: [again]})

    def fail(self, reason: str) -> None:
        """Report from outside that the engine has ended and is not replaced, which ends every stream."""
        with self._lock:
            self.link.reported_end = reason
            self.link.wakeup.set()

    def close(self) -> None:
        """Abort all requests, end their streams, and close the connection."""
        with self._lock:
            self._closing = True
            self.link.wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def ask(self, message: FromClient, answer: type[A]) -> "Future[A]":
        future: Future[A] = Future()
        check_question(message)
        with self._lock:
            self._check_usable()
            if self._lost is not None:
                raise self._no_answer(self._lost)
            self._post(self._answers.wait_for(message, answer, future))
        return future

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise copy_of(self._dead)

    def _no_answer(self, why: str) -> EngineDeadError:
        return EngineDeadError(f"the engine is being replaced and answers no questions: {why}")

    def _post(self, message: FromClient) -> None:
        """Send a message to the current engine, if there is one. A later engine is sent all open requests anyway."""
        self.link.post(*(() if self._lost is not None else (message,)))

    # ---- the session's own thread

    def _run(self) -> None:
        shorten_slice()
        try:
            while not self._closing and self._dead is None:
                self._serve()
                if self._lost is not None and self._dead is None:
                    self._recover(self._lost)
            self._leave()
        except Exception as error:
            logger.exception("the session with the engine failed")
            self._die(EngineError(f"the client failed: {error!r}"))
        finally:
            with self._lock:
                self.link.close()

    def _serve(self) -> None:
        """Send and receive until the engine is lost."""
        while not self._closing and self._dead is None and self._lost is None:
            self.link.wait()
            self.link.send_posted()
            self._receive()
            self._check()

    def _receive(self) -> None:
        while self._lost is None and (message := self.link.receive()) is not None:
            self._handle(message)

    def _handle(self, message: ToClient) -> None:
        if isinstance(message, _OF_AN_EPOCH) and message.epoch != self.welcome.epoch:
            self._lose(f"another engine took the place of the one at {self.address}")
            return
        for handler in self._handlers.get(type(message), ()):
            handler(message)

    def _on_outputs(self, message: api.OutputBatch) -> None:
        """Call each sink once, with its events of this message."""
        with self._lock:
            events, aborts = self._streams.take(message.outputs, has_engine=self._lost is None)
            self.link.post(*aborts)
        self._deliver(events)

    def _on_dying(self, message: api.Dying) -> None:
        if message.is_final:
            self._die(EngineDeadError(message.reason))
        else:
            self._lose(message.reason)

    def _on_refused(self, message: api.Refused) -> None:
        """Handle a Refused: the engine was restarted and does not know this client."""
        self._lose(f"the engine at {self.address} was restarted and refused us: {message.reason}")

    def _check(self) -> None:
        """Detect a lost connection, a reported end of the engine, or silence of an engine with open requests."""
        if self.link.lost() or self.link.reported_end is not None:
            self._receive()  # messages sent before the end still count
            if self.link.reported_end is not None:
                self._die(EngineDeadError(f"the engine died: {self.link.reported_end}"))
            elif self._dead is None and self._lost is None:
                reason = None if self._may_recover else self.link.await_end()
                self._lose(f"the engine died: {reason or f'it closed its connection at {self.address}'}")
        silent_s = self.link.silence.seconds()
        if self._streams and silent_s > self._heartbeat_timeout_s:
            self._lose(f"the engine at {self.address} has been silent for {silent_s:.0f} s")

    def _lose(self, reason: str) -> None:
        """Stop using this engine. Only the first call counts."""
        if not self._may_recover:
            self._die(EngineDeadError(reason))
        with self._lock:
            if self._dead is not None or self._lost is not None:
                return
            self._lost = reason
            # All open requests are sent again, and dropped ones end without an engine.
            self.link.discard_posted()
            self._streams.forget_dropped()
        logger.warning("%s; looking for the one that takes its place", reason)
        for feature in self._features:
            feature.lost(self._no_answer(reason))
        self.on_change(self)

    def _recover(self, reason: str) -> None:
        """Look for another engine and send it all open requests; meanwhile, end streams that are aborted or late."""
        self.link.disconnect()
        with closing(EngineSearch(self._place, self.welcome.model, reason, self._recovery_timeout_s)) as search:
            found = None
            while found is None:
                self._end_here()
                if (end := self.link.end()) is not None:
                    self._die(EngineDeadError(f"the engine died: {end}"))
                if self._closing or self._dead is not None:
                    return
                try:
                    found = search.step(self.link.wakeup)
                except EngineDeadError as error:
                    self._die(error)
                    return
        connection, self._welcome = found
        self.link.attach(connection)
        with self._lock:
            for feature in self._features:
                self.link.post(*feature.again(self.welcome))
        self._send_again()

    def _end_here(self) -> None:
        """While there is no engine: end streams that were aborted or passed their deadline."""
        with self._lock:
            ended = self._streams.take_ended()
        self._deliver(by_sink(ended))

    def _send_again(self) -> None:
        """Start all open requests in the new engine, in the order of submission."""
        with self._lock:  # held throughout: an abort either ends its stream here or is sent after its Generate
            messages, ended = self._streams.again()
            self.link.post(*messages)
            logger.info("an engine serves at %s again; %d requests continue", self.address, len(messages))
            self._lost = None
        self._deliver(by_sink(ended))
        self.on_change(self)

    def _leave(self) -> None:
        """Abort all requests in the engine and end every stream."""
        if self._lost is None:
            with self._lock:
                self.link.post(*self._streams.aborts())
            self.link.send_posted()
        self._die(EngineError("the client was closed"))

    # ---- streams

    def _deliver(self, events: dict[Sink, list[Event]]) -> None:
        for sink, its_events in events.items():
            try:
                sink(its_events)
            except Exception:  # for example a closed event loop: its streams have no reader any more
                logger.debug("a reader has gone", exc_info=True)
                for request_id in self._streams.of_sink(sink):
                    self.drop(request_id)

    def _die(self, error: EngineError) -> None:
        """End every stream with `error`. Only the first call counts, since its reason is the root cause."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
        self.on_change(self)
        with self._lock:
            streams = self._streams.end_all()
        failures = [(stream, [StreamFailure(name, copy_of(error))]) for name, stream in streams.items()]
        self._deliver(by_sink(failures))
        for feature in self._features:
            feature.lost(error)

    @property
    def _may_recover(self) -> bool:
        """Whether to look for another engine when this one is lost."""
        return self._recovery_timeout_s > 0 and self.welcome.is_supervised
