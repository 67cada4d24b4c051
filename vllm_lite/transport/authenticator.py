"""Authenticator: decides which clients may connect over tcp. ZeroMQ queries it (ZAP, RFC 27) for every client with a
key.

It answers on a thread of its own, so that a refused client learns it at once, even while the engine loads.
"""

import itertools
import threading
import time

import zmq
from zmq.utils import z85

from vllm_lite.errors import EngineError
from vllm_lite.runtime import log
from vllm_lite.transport.interface import Wakeup
from vllm_lite.transport.keys import Authorised

EVENTS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ENDPOINT = "inproc://zeromq.zap.01"
_LOOK_MS = 60_000
_QUIET_S = 60.0
_MAX_SOURCES = 1024

logger = log.get(__name__)


class Authenticator:
    """Checks the keys of one listener's clients."""

    def __init__(self, authorised: Authorised, monitor: "zmq.Socket[bytes]") -> None:
        """`monitor` reports the listener's EVENTS; this object takes ownership of it. Raises EngineError."""
        self.domain = b"vllm_lite-%d" % next(_numbers)
        """ZAP_DOMAIN for the listener, by which ZeroMQ's queries name it."""
        self._authorised = authorised
        self._monitor = monitor
        self._complaints = Complaints()
        self._stop = Wakeup()
        self._thread = threading.Thread(target=self._watch, name="authenticator", daemon=True)
        try:
            _questions.join(self)
        except BaseException:
            self._monitor.close(0)
            raise
        self._thread.start()

    def close(self) -> None:
        _questions.leave(self)
        self._stop.set()
        self._thread.join()
        self._stop.close()

    def _watch(self) -> None:
        poller = zmq.Poller()
        for item in (self._monitor, *self._stop.pollables()):
            poller.register(item, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(_LOOK_MS)
            while self._monitor.poll(0):
                _, endpoint = self._monitor.recv_multipart()
                self._complaints.add(endpoint.decode(), "something there does not shake hands as a client with keys")
        self._monitor.close(0)

    def answer(self, question: list[bytes]) -> list[bytes]:
        """Answer a query (version, number, domain, address, identity, mechanism, key): 200 if the client may
        connect."""
        version, number, _, address, _, mechanism, *credentials = question
        try:
            name = None
            if mechanism == b"CURVE" and len(credentials) == 1:
                name = self._authorised.name_of(z85.encode(credentials[0]))
        except Exception:  # without an answer, later queries would get none either
            logger.exception("a client's key could not be checked")
            return [version, number, b"500", b"", b"", b""]
        if name is None:
            self._complaints.add(address.decode(), "a client from there has a key that is not known here")
            return [version, number, b"400", b"unknown key", b"", b""]
        return [version, number, b"200", b"", name.encode(), b""]


class _Questions:
    """The socket of ZeroMQ's queries: there is one per process, so all authenticators share the thread that answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[bytes, Authenticator] = {}
        self._stop: Wakeup | None = None
        self._thread = threading.Thread()

    def join(self, member: Authenticator) -> None:
        """Add an authenticator. Raises EngineError if something else in the process answers the queries."""
        with self._lock:
            if self._stop is None:
                socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
                socket.setsockopt(zmq.LINGER, 0)
                try:
                    socket.bind(_ENDPOINT)
                except zmq.ZMQError as error:
                    socket.close()
                    raise EngineError(f"something else in this process checks keys already: {error}") from error
                self._stop = Wakeup()
                self._thread = threading.Thread(
                    target=self._run, args=(socket, self._stop), name="keys of clients", daemon=True
                )
                self._thread.start()
            self._members[member.domain] = member

    def leave(self, member: Authenticator) -> None:
        with self._lock:
            self._members.pop(member.domain, None)
            if not self._members and self._stop is not None:
                self._stop.set()
                self._thread.join()
                self._stop.close()
                self._stop = None

    def _run(self, socket: "zmq.Socket[bytes]", stop: Wakeup) -> None:
        poller = zmq.Poller()
        for item in (socket, *stop.pollables()):
            poller.register(item, zmq.POLLIN)
        while not stop.is_set():
            poller.poll(_LOOK_MS)
            while socket.poll(0):
                question = socket.recv_multipart()
                member = self._members.get(question[2])
                refusal = [*question[:2], b"400", b"unknown listener", b"", b""]
                socket.send_multipart(refusal if member is None else member.answer(question))
        socket.unbind(_ENDPOINT)
        socket.close()


_numbers = itertools.count()
_questions = _Questions()


class Complaints:
    """Logs warnings about clients: one a minute for each source, with the number of those left out."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[float, int]] = {}

    def add(self, source: str, what: str) -> None:
        now_s = time.monotonic()
        said_s, more = self._sources.get(source, (-_QUIET_S, 0))
        if now_s - said_s < _QUIET_S:
            self._sources[source] = said_s, more + 1
            return
        logger.warning("refused at %s: %s%s", source, what, f" ({more} times more since it was said)" if more else "")
        if len(self._sources) >= _MAX_SOURCES:
            self._sources.clear()
        self._sources[source] = now_s, 0
