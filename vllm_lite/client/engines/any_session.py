"""AnySession: the interface of sessions for library and server: with one engine (session.py), several on this machine
(data_parallel.py), or replicas elsewhere."""

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from vllm_lite.client.engines.asking import A, Asking
from vllm_lite.client.streams.open_stream import Sink
from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterInfo
from vllm_lite.protocol.api import ForkRequest, FromClient, Generate, Welcome
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.view import EngineView


class Member(NamedTuple):
    """One of a session's engines: its number, its Welcome, and the pending answers with its counters and, if requested,
    its view."""

    number: int
    welcome: Welcome
    stats: "Future[Stats]"
    view: "Future[EngineView] | None" = None


class AnySession(Asking):
    """Abstract base class; Session documents the methods."""

    @property
    @abstractmethod
    def welcome(self) -> Welcome:
        """The common Welcome of all engines."""

    @property
    @abstractmethod
    def adapters(self) -> dict[str, AdapterInfo]:
        """The LoRA adapters that requests can name."""

    @property
    @abstractmethod
    def num_engines(self) -> int: ...

    @property
    @abstractmethod
    def dead(self) -> EngineError | None:
        """The error with which the session has ended, as a new exception; None while requests can be submitted."""

    @property
    @abstractmethod
    def recovering(self) -> str | None:
        """Reason why streams pause: the engine, or its workers, are being replaced. None while they serve."""

    @abstractmethod
    def ask_each(self, first_block: int | None = None) -> list[Member]:
        """Query each engine for its counters, and unless `first_block` is None for a view from that block on."""

    def ask_one(self, number: int, message: FromClient, answer: type[A]) -> "Future[A]":
        """Send a query to the engine of this number only. Raises LookupError for an unknown number, EngineError."""
        if number:
            raise LookupError(number)
        return self.ask(message, answer)

    def asked_as(self, number: int, first_block: int | None) -> Member:
        """ask_each() for one engine, as number `number`. Raises EngineError."""
        view = None if first_block is None else self.view(first_block)
        return Member(number, self.welcome, self.request_stats(), view)

    @abstractmethod
    def submit(
        self, message: Generate | ForkRequest, sink: Sink, own: Generate | None = None, affinity: str | None = None
    ) -> None: ...

    @abstractmethod
    def is_live(self, request_id: str) -> bool:
        """Whether the request is open."""

    @abstractmethod
    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None: ...

    @abstractmethod
    def drop(self, request_id: str, *, stopped: bool = False) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
