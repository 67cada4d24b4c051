"""One fake for each interface, driven by the test that uses it."""

import itertools
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.deadlines import scaled
from vllm_lite import transport
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import Event
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import (
    Finished,
    FromClient,
    Generate,
    GetStats,
    Hello,
    OutputBatch,
    Refused,
    ToClient,
    Tokens,
    Welcome,
)
from vllm_lite.protocol.codec import client_to_engine, engine_to_client, pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Stats
from vllm_lite.runtime.wakeup import Wakeup

DEADLINE_S = scaled(30.0)
"""Deadline of every wait of a test: far more than needed, so that a miss means a bug and not a slow machine."""

_numbers = itertools.count()
M = TypeVar("M")


def welcome(**changes: object) -> Welcome:
    values = {
        "version": PROTOCOL_VERSION,
        "epoch": 1,
        "model": "fake",
        "max_model_len": 64,
        "vocab_size": 300,
        "eos_token_ids": (2,),
        "num_blocks": 32,
        "block_size": 4,
    }
    return Welcome(**(values | changes))  # type: ignore[arg-type]


class FakeEngine:
    """An engine as its clients see it: it answers handshakes by itself; the test sends everything else.

    `expect(Generate)` returns the next message from a client; `send`, `tokens` and `finish` answer its sender.
    """

    def __init__(
        self, *, answer: ToClient | None = None, silent: bool = False, address: str | None = None, epoch: int = 1
    ) -> None:
        """`answer`: the reply to Hello; if `silent`, there is no reply until `greet()`. `address`: the address of a
        fake engine that has died, which this one replaces."""
        self.address = address or f"inproc://fake-engine-{next(_numbers)}"
        self.epoch = epoch
        self.answer: ToClient = answer or welcome(epoch=epoch)
        self.hellos: list[Hello] = []
        self._listener = transport.bind(self.address)
        self.heard: queue.Queue[FromClient] = queue.Queue()
        self._peer = b""
        self._greeted: set[bytes] = set()
        self._greeting = threading.Event()
        if not silent:
            self._greeting.set()
        self._stop = Wakeup()
        self._dying = False
        self._thread = threading.Thread(target=self._listen, name="fake engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    def expect(self, kind: type[M]) -> M:
        """The next message; it must be of this kind."""
        message = self.heard.get(timeout=DEADLINE_S)
        assert isinstance(message, kind), message
        return message

    def expect_nothing_more(self) -> None:
        assert self.heard.empty(), self.heard.get()

    def greet(self) -> None:
        self._greeting.set()
        self._stop.set()

    def send(self, message: ToClient) -> None:
        self.send_raw(engine_to_client.encode(message))

    def send_raw(self, payload: bytes) -> None:
        self._listener.send(self._peer, payload)

    def send_outputs(self, *outputs: Tokens | Finished) -> None:
        self.send(OutputBatch(self.epoch, list(outputs)))

    def tokens(self, request_id: str, start: int, *token_ids: int) -> None:
        self.send_outputs(Tokens(request_id, start, list(token_ids)))

    def finish(self, request_id: str, start: int, *token_ids: int, reason: str = "length", **fields: object) -> None:
        self.send_outputs(Finished(request_id, start, list(token_ids), reason, **fields))  # type: ignore[arg-type]

    def successor(self, **options: Any) -> "FakeEngine":
        """Close the connection as a killed process does, and start another engine at the same address."""
        self.die()
        return FakeEngine(address=self.address, **({"epoch": self.epoch + 1} | options))

    def die(self) -> None:
        """Close the connection as a killed process does."""
        if self._thread.is_alive():
            self._dying = True
            self._stop.set()
            self._thread.join(DEADLINE_S)
            self._listener.close()

    def _listen(self) -> None:
        greeted = False
        while not self._dying:
            transport.wait(DEADLINE_S, self._listener, self._stop)
            self._stop.clear()
            while (item := self._listener.recv()) is not None:
                message = client_to_engine.decode(item[1])
                if isinstance(message, Hello):
                    self._peer = item[0]
                    self._greeted.add(self._peer)
                    self.hellos.append(message)
                    greeted = False
                elif item[0] in self._greeted:
                    self.heard.put(message)
                else:
                    self._listener.send(item[0], engine_to_client.encode(Refused("say Hello first")))
            if self.hellos and not greeted and self._greeting.is_set():
                greeted = True
                self.send(self.answer)


class Sink:
    """Collects events; `next()` waits for one."""

    def __init__(self) -> None:
        self.calls: queue.Queue[list[Event]] = queue.Queue()
        self.waiting: list[Event] = []

    def __call__(self, events: list[Event]) -> None:
        self.calls.put(events)

    def next(self) -> Event:
        if not self.waiting:
            self.waiting = list(self.calls.get(timeout=DEADLINE_S))
        return self.waiting.pop(0)

    def is_empty(self) -> bool:
        return not self.waiting and self.calls.empty()


@contextmanager
def session_with(engine: FakeEngine, **options: object) -> Iterator[Session]:
    session = Session.connect(engine.address, timeout_s=DEADLINE_S, **options)  # type: ignore[arg-type]
    try:
        yield session
    finally:
        session.close()
        engine.die()


def start(session: Session, engine: FakeEngine, request_id: str, sink: Sink) -> None:
    session.submit(Generate(request_id, pack_tokens([1, 2]), SamplingParams()), sink)
    assert engine.expect(Generate).request_id == request_id


def settle(session: Session, engine: FakeEngine) -> None:
    """Return when the session has handled everything that the engine has sent."""
    future = session.request_stats()
    while not isinstance(engine.heard.get(timeout=DEADLINE_S), GetStats):
        pass
    engine.send(STATS)
    future.result(DEADLINE_S)


STATS = Stats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


class Exits:
    """Collects the reason a child ended for."""

    def __init__(self) -> None:
        self.reason = ""
        self.event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.event.set()

    def wait(self) -> str:
        assert self.event.wait(2 * DEADLINE_S), "the child did not end before the deadline"
        return self.reason
