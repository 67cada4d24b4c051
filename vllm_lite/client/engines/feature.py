"""SessionFeature: the interface for what a session follows beside requests, and its implementations."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from vllm_lite.client.engines.any_session import ANSWERS
from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, AdapterList, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.api import FromClient, Recovered, Recovering, Welcome
from vllm_lite.runtime import log

logger = log.get(__name__)
Handlers = Mapping[type, Callable[[Any], None]]
"""Message type -> handler."""


class SessionFeature:
    """Follows a session's engine and its successors. Called on the session's thread."""

    def handlers(self) -> Handlers:
        """The message types that it handles, with their handlers."""
        raise NotImplementedError

    def again(self, welcome: Welcome) -> Sequence[FromClient]:  # noqa: ARG002
        """Return the messages that bring a new engine, which sent `welcome`, to the state of the previous one. They are
        sent before all requests."""
        return ()

    def lost(self, error: EngineError) -> None:
        """Handle the loss of the engine or the end of the session, described by `error`. Called without a lock."""


def all_handlers(features: Iterable[SessionFeature], own: Handlers) -> dict[type, list[Callable[[Any], None]]]:
    """Map each message type to its handlers, those of features before the session's `own`."""
    handlers: dict[type, list[Callable[[Any], None]]] = {}
    for some in (*(feature.handlers() for feature in features), own):
        for kind, handler in some.items():
            handlers.setdefault(kind, []).append(handler)
    return handlers


# ---- LostWorkers: whether the engine is replacing its workers


class LostWorkers(SessionFeature):
    """State of one session, changed by its thread."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.reason: str | None = None
        """Reason why the engine has no workers; None while they serve."""
        self._on_change = on_change

    def handlers(self) -> Handlers:
        return dict.fromkeys((Recovering, Recovered), self._on_message)

    def lost(self, error: EngineError) -> None:  # noqa: ARG002
        self.reason = None

    def _on_message(self, message: Recovering | Recovered) -> None:
        self.reason = message.reason if isinstance(message, Recovering) else None
        self._on_change()


# ---- KnownAdapters: the LoRA adapters that requests can name


class KnownAdapters(SessionFeature):
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
        return {AdapterAnswer: self.on_answer, AdapterList: lambda message: self.on_list(message.adapters)}

    def again(self, welcome: Welcome) -> list[LoadAdapter]:
        return self.load_again(welcome.adapters)

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


# ---- Answers: queries that have not been answered


class Answers(SessionFeature):
    """The engine answers queries of one kind in order; those about adapters, which take as long as a file is read, have
    numbers. Any thread may ask; the session's thread completes the futures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_order: defaultdict[type, deque[Future[Any]]] = defaultdict(deque)
        self._numbered: dict[int, Future[Any]] = {}
        self._num_asked = 0

    def wait_for(self, message: FromClient, kind: type, future: Future[Any]) -> FromClient:
        """Register `future` for the answer of type `kind` to `message`. Returns the message to send."""
        with self._lock:
            if isinstance(message, LoadAdapter | UnloadAdapter):
                self._num_asked += 1
                self._numbered[self._num_asked] = future
                return msgspec.structs.replace(message, question=self._num_asked)
            self._in_order[kind].append(future)
            return message

    def handlers(self) -> Handlers:
        return dict.fromkeys(ANSWERS, self._on_answer)

    def lost(self, error: EngineError) -> None:
        """Fail all pending queries with `error`."""
        with self._lock:
            questions = [future for futures in self._in_order.values() for future in futures]
            questions += self._numbered.values()
            self._in_order.clear()
            self._numbered.clear()
        for future in questions:
            if future.set_running_or_notify_cancel():
                future.set_exception(copy_of(error))

    def _on_answer(self, answer: object) -> None:
        with self._lock:
            future = self._take(answer)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def _take(self, answer: object) -> Future[Any] | None:
        """Remove and return the future that waits for this answer, or None."""
        if isinstance(answer, AdapterAnswer):
            if not answer.question and answer.error is not None:  # the answer to KnownAdapters.load_again()
                logger.warning("%s", answer.error)
            return self._numbered.pop(answer.question, None)
        futures = self._in_order[type(answer)]
        return futures.popleft() if futures else None


def copy_of(error: EngineError) -> EngineError:
    """A copy of `error` for one raiser: an exception raised by several threads would collect all their tracebacks."""
    return type(error)(str(error))
