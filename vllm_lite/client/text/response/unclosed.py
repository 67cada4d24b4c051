"""Calls at the end of unclosed reasoning: some models write a call and stop without ending their thinking.

Text inside reasoning that begins like a call is held back. If only complete calls of known tools follow up to the end
of the output, they are the calls of the message; otherwise all of it was reasoning.
"""

from collections.abc import Container
from typing import Protocol

from vllm_lite.client.text.response.arguments import arguments_of
from vllm_lite.client.text.response.events import CallDelta, Event

MAX_TAIL_CHARS = 131_072
"""Maximum characters of a tail; a longer one is reasoning, like all text after it."""
MAX_TAILS = 32
"""Maximum number of tails in one output that prove to be no calls; each is parsed again."""
MAX_TAILS_AT_END = 4
"""Maximum number of tails that prove to be no calls only at the end of the output, where all are parsed at once."""


class TailParser(Protocol):
    """Parses a text as if it were content."""

    def feed_text(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class Tail:
    """The text from a literal on that may begin the calls."""

    def __init__(self, parser: TailParser, names: Container[str], opening: str) -> None:
        """`names`: names of the tools that may be called."""
        self.opening = opening
        self.is_long = False
        self._parser = parser
        self._names = names
        self._parts: list[str] = []
        self._num_chars = 0
        self._calls: list[tuple[str, list[str]]] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, text: str) -> bool:
        """Take more text; the opening comes first. Returns whether all of it may still be calls."""
        self._parts.append(text)
        room = MAX_TAIL_CHARS - self._num_chars
        self._num_chars += len(text)
        is_good = self._take(self._parser.feed_text(text[:room]))
        self.is_long = is_good and len(text) > room
        return is_good and not self.is_long

    def finish(self) -> list[tuple[str, str]] | None:
        """End the output. Returns names and arguments of the calls; None unless the text is complete calls only."""
        if not self._take(self._parser.finish()) or not self._calls:
            return None
        calls = [(name, "".join(parts)) for name, parts in self._calls]
        return calls if all(arguments_of(text) is not None for _, text in calls) else None

    def _take(self, events: list[Event]) -> bool:
        for event in events:
            if not isinstance(event, CallDelta):
                return False
            if event.name is not None:
                if event.name not in self._names:
                    return False
                self._calls.append((event.name, []))
            self._calls[-1][1].append(event.arguments)
        return True
