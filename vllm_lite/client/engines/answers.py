"""Answers: unanswered queries of a session beside its requests.

The engine answers queries of one kind in order. Queries about adapters take as long as a file is read, so they have
numbers.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from vllm_lite.client.engines.asking import ANSWERS
from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.api import FromClient, Welcome
from vllm_lite.runtime import log

logger = log.get(__name__)


class Answers:
    """A SessionFeature. Any thread may ask; the session's thread completes the futures."""

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

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See SessionFeature.handlers."""
        return dict.fromkeys(ANSWERS, self._on_answer)

    def again(self, welcome: Welcome) -> Sequence[FromClient]:  # noqa: ARG002
        """See SessionFeature.again: queries are not sent again."""
        return ()

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
