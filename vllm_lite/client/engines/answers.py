"""Answers: what a session has asked its engine beside requests, and who waits for it.

Most questions are answered in their order, each kind by itself. Those about adapters take as long as a file is read, so
they have numbers.
"""

from collections import defaultdict, deque
from concurrent.futures import Future
from typing import Any

import msgspec

from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.api import FromClient
from vllm_lite.runtime import log

logger = log.get(__name__)


class Answers:
    """Futures of questions that are not answered. Not thread-safe: the session has a lock."""

    def __init__(self) -> None:
        self._in_order: defaultdict[type, deque[Future[Any]]] = defaultdict(deque)
        self._numbered: dict[int, Future[Any]] = {}
        self._num_asked = 0

    def wait_for(self, message: FromClient, kind: type, future: Future[Any]) -> FromClient:
        """The answer of this kind to `message` is for `future`. Returns the message to be sent."""
        if isinstance(message, LoadAdapter | UnloadAdapter):
            self._num_asked += 1
            self._numbered[self._num_asked] = future
            return msgspec.structs.replace(message, question=self._num_asked)
        self._in_order[kind].append(future)
        return message

    def awaited(self, answer: object) -> Future[Any] | None:
        """Who waits for this answer; nobody does any more."""
        if isinstance(answer, AdapterAnswer):
            if not answer.question and answer.error is not None:  # nobody waits: it was loaded once before
                logger.warning("%s", answer.error)
            return self._numbered.pop(answer.question, None)
        futures = self._in_order[type(answer)]
        return futures.popleft() if futures else None

    def take_all(self) -> list[Future[Any]]:
        """All that are not answered, and will not be."""
        questions = [future for futures in self._in_order.values() for future in futures]
        questions += self._numbered.values()
        for futures in self._in_order.values():
            futures.clear()
        self._numbered.clear()
        return questions


def fail_all(questions: list[Future[Any]], error: EngineError) -> None:
    for future in questions:
        if future.set_running_or_notify_cancel():
            future.set_exception(copy_of(error))


def copy_of(error: EngineError) -> EngineError:
    """Copy `error` for one raiser: an exception that several threads raise would collect all their tracebacks."""
    return type(error)(str(error))
