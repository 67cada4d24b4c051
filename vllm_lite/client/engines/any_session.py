"""AnySession: what the library and the server use of a session, whatever stands behind it: one engine (session.py),
several on this machine (data_parallel.py), or replicas elsewhere."""

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
    """One of the engines behind a session: its number, what it says of itself, its counters, which it was asked for,
    and its view, if it was asked for that."""

    number: int
    welcome: Welcome
    stats: "Future[Stats]"
    view: "Future[EngineView] | None" = None


class AnySession(Asking):
    """Abstract; each method is described where it does most, in Session."""

    @property
    @abstractmethod
    def welcome(self) -> Welcome:
        """Abilities that all engines have in common."""

    @property
    @abstractmethod
    def adapters(self) -> dict[str, AdapterInfo]:
        """The LoRA adapters that requests may name."""

    @property
    @abstractmethod
    def num_engines(self) -> int: ...

    @property
    @abstractmethod
    def dead(self) -> EngineError | None:
        """Why nothing can be submitted any more, None as long as it can. A new exception each time."""

    @property
    @abstractmethod
    def recovering(self) -> str | None:
        """Why streams pause: the engine, or its workers, are being replaced. None while they serve."""

    @abstractmethod
    def ask_each(self, first_block: int | None = None) -> list[Member]:
        """Ask the engines for their counters, one by one, and unless `first_block` is None for a view from there on."""

    def ask_one(self, number: int, message: FromClient, answer: type[A]) -> "Future[A]":
        """Ask the engine of this number alone. Raises LookupError if there is none, EngineError."""
        if number:
            raise LookupError(number)
        return self.ask(message, answer)

    def asked_as(self, number: int, first_block: int | None) -> Member:
        """Ask one engine, the one of this number. Raises EngineError."""
        view = None if first_block is None else self.view(first_block)
        return Member(number, self.welcome, self.request_stats(), view)

    @abstractmethod
    def submit(
        self, message: Generate | ForkRequest, sink: Sink, own: Generate | None = None, affinity: str | None = None
    ) -> None: ...

    @abstractmethod
    def is_live(self, request_id: str) -> bool:
        """Whether this request has not ended."""

    @abstractmethod
    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None: ...

    @abstractmethod
    def drop(self, request_id: str, *, stopped: bool = False) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
