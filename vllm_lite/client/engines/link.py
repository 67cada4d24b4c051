"""SessionLink: a session's connection to its current engine, and the reason why that engine ended."""

import time
from collections import deque
from collections.abc import Callable

from vllm_lite.client.engines.connection import REASON_S, Alive
from vllm_lite.errors import ProtocolError, RequestError
from vllm_lite.protocol.api import FromClient, ToClient
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.runtime import log
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Connection, Delivery
from vllm_lite.transport.interface import poller


class Silence:
    """Time since the last message of the engine, or since construction, counted only while this process ran: `docker
    pause`, or a host that stops its guests, stops both at once.

    Calls of seconds() that are further apart than `most_apart_s` mean that this process did not run."""

    def __init__(self, most_apart_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_apart_s = most_apart_s
        self._clock = clock
        self._heard_s = self._looked_s = clock()

    def end(self) -> None:
        """Reset the time: the engine was heard, or had no reason to send. Any thread may call this."""
        self._heard_s = self._looked_s = self._clock()

    def seconds(self) -> float:
        """The time, in which at most `most_apart_s` count since the previous call."""
        now_s = self._clock()
        absent_s = now_s - self._looked_s - self._most_apart_s
        if absent_s > 0:
            self._heard_s = min(self._heard_s + absent_s, now_s)  # end() may have come meanwhile
        self._looked_s = now_s
        return now_s - self._heard_s


_IDLE_POLL_MS = 1000
_BUSY_POLL_MS = 5
_MOST_APART_S = 3.0  # it looks once a second at least

logger = log.get(__name__)


def encoded(request: FromClient) -> bytes:
    """Encode a request, which has values of a user, in the user's thread: an error in the session's would end all
    requests. Raises RequestError."""
    try:
        return client_to_engine.encode(request)
    except (TypeError, ValueError) as error:  # ValueError: half a surrogate pair in a text
        raise RequestError(f"the request has a value that cannot be sent: {error}") from error


def check_question(question: FromClient) -> None:
    """Raise RequestError for a question that the engine would drop, as a malformed one has no answer."""
    try:
        client_to_engine.decode(encoded(question))
    except ProtocolError as error:
        raise RequestError(f"the question has a value that the engine does not take: {error.__cause__}") from error


class SessionLink:
    """Any thread may post messages, under the session's lock. Only the session's thread sends and receives."""

    def __init__(self, connection: Connection, alive: Alive | None) -> None:
        self.wakeup = Wakeup()
        self.silence = Silence(_MOST_APART_S)
        self.num_malformed = 0
        """Number of messages that could not be decoded, of all engines so far."""
        self.reported_end: str | None = None
        """Reason why the engine ended for good, reported from outside (Session.fail)."""
        self._alive = alive
        self._posted: deque[bytes] = deque()
        self._attach(connection)

    def attach(self, connection: Connection) -> None:
        """Use the connection to a new engine."""
        self._attach(connection)
        self.silence.end()

    def _attach(self, connection: Connection) -> None:
        self._connection = connection
        self._watched = poller(connection, self.wakeup)

    @property
    def num_posted(self) -> int:
        """Number of messages that have not been sent."""
        return len(self._posted)

    def post(self, *messages: FromClient) -> None:
        """Queue messages for the engine, and wake the session's thread."""
        self.post_encoded(*map(client_to_engine.encode, messages))

    def post_encoded(self, *payloads: bytes) -> None:
        self._posted += payloads
        self.wakeup.set()

    def discard_posted(self) -> None:
        self._posted.clear()

    def wait(self) -> None:
        """Wait for a message of the engine, for the wakeup, or for a second; only briefly while messages are queued.

        Clears the wakeup."""
        self._watched.poll(_BUSY_POLL_MS if self._posted else _IDLE_POLL_MS)
        self.wakeup.clear()

    def send_posted(self) -> None:
        """Send as many queued messages as the connection accepts now."""
        while self._posted:
            if self._connection.send(self._posted[0]) is Delivery.BUSY:
                return
            self._posted.popleft()

    def receive(self) -> ToClient | None:
        """The engine's next message, or None. Messages that cannot be decoded are dropped."""
        while (payload := self._connection.recv()) is not None:
            self.silence.end()
            try:
                message: ToClient = engine_to_client.decode(payload)
            except ProtocolError as error:
                self.num_malformed += 1
                logger.warning("dropped from the engine (%d so far): %s", self.num_malformed, error)
            else:
                return message
        return None

    def lost(self) -> bool:
        """Whether the connection was closed by the engine."""
        return self._connection.lost()

    def end(self) -> str | None:
        """Reason why the engine ended for good; None while it runs or may be replaced, as far as is known."""
        return self.reported_end or (self._alive() if self._alive is not None else None)

    def await_end(self) -> str | None:
        """Wait briefly for end() after the connection was lost: the engine's supervisor may notice a moment later."""
        deadline_s = time.monotonic() + REASON_S
        while (reason := self.end()) is None and self._alive is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return reason

    def disconnect(self) -> None:
        """Close the connection. Messages may still be posted."""
        self._connection.close()

    def close(self) -> None:
        self._connection.close()
        self.wakeup.close()
