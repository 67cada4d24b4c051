"""SessionFeature: the interface for what a session follows beside requests, and its implementations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, AdapterList, LoadAdapter
from vllm_lite.protocol.api import FromClient, Recovered, Recovering, Welcome

Handlers = Mapping[type, Callable[[Any], None]]
"""Message type -> handler."""


class SessionFeature(Protocol):
    """Follows a session's engine and its successors. Called on the session's thread."""

    def handlers(self) -> Handlers:
        """The message types that it handles, with their handlers."""
        ...

    def again(self, welcome: Welcome) -> Sequence[FromClient]:
        """Return the messages that bring a new engine, which sent `welcome`, to the state of the previous one. They are
        sent before all requests."""
        ...

    def lost(self, error: EngineError) -> None:
        """Handle the loss of the engine or the end of the session, described by `error`. Called without a lock."""
        ...


def all_handlers(features: Iterable[SessionFeature], own: Handlers) -> dict[type, list[Callable[[Any], None]]]:
    """Map each message type to its handlers, those of features before the session's `own`."""
    handlers: dict[type, list[Callable[[Any], None]]] = {}
    for some in (*(feature.handlers() for feature in features), own):
        for kind, handler in some.items():
            handlers.setdefault(kind, []).append(handler)
    return handlers


# ---- LostWorkers: whether the engine is replacing its workers


class LostWorkers:
    """State of one session, changed by its thread."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.reason: str | None = None
        """Reason why the engine has no workers; None while they serve."""
        self._on_change = on_change

    def handlers(self) -> Handlers:
        """See SessionFeature.handlers."""
        return dict.fromkeys((Recovering, Recovered), self._on_message)

    def again(self, welcome: Welcome) -> Sequence[FromClient]:  # noqa: ARG002
        """See SessionFeature.again: there is nothing to be sent."""
        return ()

    def lost(self, error: EngineError) -> None:  # noqa: ARG002
        """See SessionFeature.lost: another engine starts with workers."""
        self.reason = None

    def _on_message(self, message: Recovering | Recovered) -> None:
        self.reason = message.reason if isinstance(message, Recovering) else None
        self._on_change()


# ---- KnownAdapters: the LoRA adapters that requests can name


class KnownAdapters:
    """Adapters of one session, changed by its thread; `by_name` is a new dict after every change."""

    def __init__(self, listed: Iterable[AdapterInfo]) -> None:
        self.by_name: dict[str, AdapterInfo] = {}
        self._reloading: dict[str, AdapterInfo] = {}
        """Adapters that a new engine is loading again; requests that name them wait there for the load."""
        self.on_list(listed)

    def on_list(self, listed: Iterable[AdapterInfo]) -> None:
        """Replace the list by the engine's, keeping adapters that are being loaded again."""
        has = {info.name: info for info in listed}
        self.by_name = has | {name: info for name, info in self._reloading.items() if name not in has}

    def handlers(self) -> Handlers:
        """See SessionFeature.handlers."""
        return {AdapterAnswer: self.on_answer, AdapterList: lambda message: self.on_list(message.adapters)}

    def again(self, welcome: Welcome) -> list[LoadAdapter]:
        """See SessionFeature.again."""
        return self.load_again(welcome.adapters)

    def lost(self, error: EngineError) -> None:
        """See SessionFeature.lost: the adapters stay known, and a new engine will load them."""

    def load_again(self, listed: Iterable[AdapterInfo]) -> list[LoadAdapter]:
        """Messages that load the adapters which a new engine lacks, since it only has those of its configuration."""
        has = {info.name for info in listed}
        self._reloading = {name: info for name, info in self.by_name.items() if name not in has}
        return [LoadAdapter(0, info.name, info.path, parent=info.parent) for info in self._reloading.values()]

    def on_answer(self, answer: AdapterAnswer) -> None:
        """Handle the answer to a message of load_again(): drop an adapter that cannot be loaded any more."""
        if answer.question:
            return
        if self._reloading.pop(answer.name, None) is not None and answer.error is not None:
            self.by_name = {name: info for name, info in self.by_name.items() if name != answer.name}
