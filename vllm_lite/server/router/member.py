"""FleetModel: a model of the fleet: its status, its processes, and the requests that wait for it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router.catalog import Entry
from vllm_lite.server.router.placement import ModelStatus

MakeBackend = Callable[[Entry, Callable[[], None]], Any]
"""Makes the processes of an entry, a ModelServer or a fake of one, which call the callable when they end, on any
thread."""


@dataclass
class ModelCounts:
    """Events of a model so far."""

    loads: int = 0
    wakes: int = 0
    sleeps: int = 0
    stops: int = 0
    deaths: int = 0
    failures: int = 0
    refusals: int = 0
    load_s: float = 0.0
    """Total time of all loads and wakes."""


@dataclass
class FleetModel:
    entry: Entry
    status: ModelStatus
    backend: Any = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    counts: ModelCounts = field(default_factory=ModelCounts)
    trouble: str | None = None
    """The reason why the model cannot be loaded, for now or permanently."""
    retry_at_s: float | None = None
    """Time of the next try after `trouble`; None: never."""
    failures_in_a_row: int = 0
    load_s: float = 0.0
    """Loading time in seconds, as a moving average."""
    keep_alive_s: float | None = None
    """Seconds for which the model stays loaded without requests, from its entry or the last request that set it."""
    is_let_go: bool = False
    """Whether the model is to be unloaded as soon as it has no requests, whatever its keep-alive time."""
    estimate: asyncio.Future[int] | None = None
    """Estimated memory, made for the model's first request."""
    card: dict[str, Any] = field(default_factory=dict)
    """The model's entry of /v1/models, once it has been loaded."""

    @property
    def state(self) -> str:
        status = self.status
        if status.op is not None:
            return "loading" if status.op == "load" else "unloading"
        return "failed" if self.trouble is not None and status.state == "unloaded" else status.state

    def wake_waiters(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def refuse(self, error: ApiError) -> None:
        """Answer all waiting requests with `error`."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.waiters.clear()
