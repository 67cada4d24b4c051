"""The seam at which something that engines do beside requests hangs onto a session."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, AdapterList, LoadAdapter
from vllm_lite.protocol.api import FromClient, Recovered, Recovering, Welcome

Handlers = Mapping[type, Callable[[Any], None]]
"""Kinds of messages of an engine, each with a function that takes them."""


class SessionFeature(Protocol):
    """Follows the engine of a session, and those that take its place. It is called on the session's thread."""

    def handlers(self) -> Handlers:
        """The kinds of messages that it takes, and what takes them."""
        ...

    def again(self, welcome: Welcome) -> Sequence[FromClient]:
        """Return the messages that bring another engine, which said `welcome`, to where the one before it was. They
        are sent before all requests."""
        ...

    def lost(self, error: EngineError) -> None:
        """Take note that the engine was lost or that the session has ended: `error` says so. Called without a lock."""
        ...


def all_handlers(features: Iterable[SessionFeature], own: Handlers) -> dict[type, list[Callable[[Any], None]]]:
    """Map each kind of message to its handlers, those of features before the session's `own`."""
    handlers: dict[type, list[Callable[[Any], None]]] = {}
    for some in (*(feature.handlers() for feature in features), own):
        for kind, handler in some.items():
            handlers.setdefault(kind, []).append(handler)
    return handlers


# ---- LostWorkers: whether the engine is replacing its workers


class LostWorkers:
    """Belongs to one session, whose thread changes it."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.reason: str | None = None
        """Why the engine has no workers at present."""
        self._on_change = on_change

    def handlers(self) -> Handlers:
        """As SessionFeature.handlers."""
        return dict.fromkeys((Recovering, Recovered), self._on_message)

    def again(self, welcome: Welcome) -> Sequence[FromClient]:  # noqa: ARG002
        """As SessionFeature.again: there is nothing to be sent."""
        return ()

    def lost(self, error: EngineError) -> None:  # noqa: ARG002
        """As SessionFeature.lost: another engine starts with workers."""
        self.reason = None

    def _on_message(self, message: Recovering | Recovered) -> None:
        self.reason = message.reason if isinstance(message, Recovering) else None
        self._on_change()


# ---- KnownAdapters: the LoRA adapters that requests may name, as the engine lists them, whichever engine serves


class KnownAdapters:
    """Belongs to one session, whose thread changes it; `by_name` is a new dict after every change."""

    def __init__(self, listed: Iterable[AdapterInfo]) -> None:
        self.by_name: dict[str, AdapterInfo] = {}
        self._reloading: dict[str, AdapterInfo] = {}
        """Those that another engine is to load again: requests that name them wait there for that."""
        self.on_list(listed)

    def on_list(self, listed: Iterable[AdapterInfo]) -> None:
        """The engine has these; others may be on their way."""
        has = {info.name: info for info in listed}
        self.by_name = has | {name: info for name, info in self._reloading.items() if name not in has}

    def handlers(self) -> Handlers:
        """As SessionFeature.handlers."""
        return {AdapterAnswer: self.on_answer, AdapterList: lambda message: self.on_list(message.adapters)}

    def again(self, welcome: Welcome) -> list[LoadAdapter]:
        """As SessionFeature.again."""
        return self.load_again(welcome.adapters)

    def lost(self, error: EngineError) -> None:
        """As SessionFeature.lost: the adapters stay known, and another engine is to load them."""

    def load_again(self, listed: Iterable[AdapterInfo]) -> list[LoadAdapter]:
        """Messages that load the adapters which a new engine lacks: it has those of its configuration alone."""
        has = {info.name for info in listed}
        self._reloading = {name: info for name, info in self.by_name.items() if name not in has}
        return [LoadAdapter(0, info.name, info.path, parent=info.parent) for info in self._reloading.values()]

    def on_answer(self, answer: AdapterAnswer) -> None:
        """Take the answer to one of those messages. One that cannot be loaded any more is known no more."""
        if answer.question:
            return
        if self._reloading.pop(answer.name, None) is not None and answer.error is not None:
            self.by_name = {name: info for name, info in self.by_name.items() if name != answer.name}
