"""Findings: keywords of one schema that cannot be enforced: an error in a strict schema, reported in a lenient one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from vllm_lite.errors import RequestError
from vllm_lite.structured.regexes.regex_tree import NotHeldError

MAX_NOTES = 100
ALLOWED_S = 1.0
"""Seconds for rewriting patterns per request. Most schemas need none, the hardest patterns about a second."""
T = TypeVar("T")


def refusal(pointer: str, problem: str) -> RequestError:
    """Make the error for the place `pointer` of a schema; the root is ""."""
    return RequestError(f"the JSON schema at #{pointer}: {problem}")


class Allowance:
    """Seconds left for the schemas of one request that take unusually long."""

    def __init__(self, seconds: float = ALLOWED_S) -> None:
        self.left_s = seconds

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Subtract the time spent in the context."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.left_s -= time.monotonic() - began_s


class Findings:
    """Collects the keywords of one schema that are not enforced.

    `notes` have the place as a JSON pointer and the keyword: `#/properties/a: 'not'`.
    """

    def __init__(self, *, is_lenient: bool, allowance: Allowance | None = None) -> None:
        self.is_lenient = is_lenient
        self.allowance = allowance or Allowance()
        self.notes: list[str] = []

    def cannot(self, pointer: str, keyword: str, problem: str) -> None:
        """Note a keyword, or a value of it, that the caller drops. Raises RequestError with the problem if the schema
        is strict."""
        if not self.is_lenient:
            raise refusal(pointer, problem)
        self.note(pointer, keyword)

    def note(self, pointer: str, keyword: str) -> None:
        """Note something that is not enforced, even if the schema is strict."""
        found = f"#{pointer}: {keyword!r}" if keyword else f"#{pointer}"
        if len(self.notes) < MAX_NOTES and found not in self.notes:
            self.notes.append(found)

    def translated(self, work: Callable[[], T]) -> T:
        """Do work that rewrites patterns. Raises NotHeldError if the allowance is used up."""
        if self.allowance.left_s < 0:
            raise NotHeldError("the patterns before it took too long")
        with self.allowance.spent():
            return work()
