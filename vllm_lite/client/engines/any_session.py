"""AnySession: the interface of sessions for library and server: with one engine (session.py), several on this machine
(data_parallel.py), or replicas elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from vllm_lite.client.streams.open_stream import Sink
from vllm_lite.errors import EngineError
from vllm_lite.protocol import api
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.api import ForkRequest, FromClient, Generate, Welcome
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, FindExternal
from vllm_lite.protocol.operations import Operation, OperationDone
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.view import BlockContent, EngineView, GetView, PrefixSeen

STATS_TIMEOUT_S = 10.0
ANSWERS = (
    Stats,
    api.Descriptions,
    ExternalFound,
    ExternalAborted,
    api.PrefixCacheReset,
    OperationDone,
    AdapterAnswer,
    EngineView,
    BlockContent,
    PrefixSeen,
)

A = TypeVar("A")


class Asking(ABC):
    """The queries of a session. Without an engine they raise EngineError, and pending futures fail with EngineError."""

    address: str

    @abstractmethod
    def ask(self, message: FromClient, answer: type[A]) -> "Future[A]":
        """Send a query that is answered by a message of type `answer`, one of ANSWERS. Raises EngineError."""

    def request_stats(self) -> "Future[Stats]":
        return self.ask(api.GetStats(), Stats)

    def describe(
        self, request_ids: Sequence[str] = (), external_id: str = "", *, with_content: bool = False
    ) -> "Future[api.Descriptions]":
        """Query the state of live requests of any client: those with these ids, and all with the external id."""
        return self.ask(api.Describe(tuple(request_ids), external_id, with_content), api.Descriptions)

    def view(self, first_block: int = 0) -> "Future[EngineView]":
        """Query a view of the engine's present state, with the KV blocks from `first_block` on."""
        return self.ask(GetView(first_block), EngineView)

    def find_external(self, external_ids: Sequence[str]) -> "Future[ExternalFound]":
        """Query which of these external ids have live requests, of any client."""
        return self.ask(FindExternal(tuple(external_ids)), ExternalFound)

    def abort_external(self, external_id: str) -> "Future[ExternalAborted]":
        """Let the engine end all requests with this external id, of any client."""
        return self.ask(AbortExternal(external_id), ExternalAborted)

    def reset_prefix_cache(self, *, stored: bool = False) -> "Future[api.PrefixCacheReset]":
        return self.ask(api.ResetPrefixCache(stored), api.PrefixCacheReset)

    def operate(self, message: Operation) -> "Future[OperationDone]":
        """Let the engine pause, sleep, or load other weights. The answer comes when that is done, which may be when the
        last request has ended."""
        return self.ask(message, OperationDone)

    def load_adapter(
        self, name: str, path: str, *, in_place: bool = False, parent: str | None = None
    ) -> "Future[AdapterAnswer]":
        """Let the engine load a LoRA adapter; `in_place`: it may replace one of the same name."""
        return self.ask(LoadAdapter(0, name, path, in_place, parent), AdapterAnswer)

    def unload_adapter(self, name: str) -> "Future[AdapterAnswer]":
        return self.ask(UnloadAdapter(0, name), AdapterAnswer)

    def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> Stats:
        """The engine's counters. Raises EngineError if it does not answer within `timeout_s`."""
        return self.wait(self.request_stats(), timeout_s)

    def wait(self, answer: "Future[A]", timeout_s: float = STATS_TIMEOUT_S) -> A:
        """Wait for an answer. Raises EngineError after `timeout_s`."""
        try:
            return answer.result(timeout_s)
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.address} did not answer within {timeout_s:g} s") from error


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

    def engine_for(self, request: Generate, affinity: str | None = None) -> int:  # noqa: ARG002
        """The number of the engine that submit() would choose for `request` now. Raises EngineError."""
        return 0

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
