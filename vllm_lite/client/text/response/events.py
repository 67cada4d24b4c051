"""Pieces of an output, and the events of its message. Events are final, and in the order in which the model wrote
them."""

from typing import NamedTuple

import msgspec


class OutputPiece(NamedTuple):
    """A part of an output: ordinary text of any length, or one added token of the vocabulary with its text.

    The text of an added token matches a literal of a format; ordinary text that only spells it does not.
    """

    text: str
    token_id: int | None = None


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning."""

    text: str


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the content."""

    text: str


class CallDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the call `index`: its name once, in the first event of the call, then parts of its arguments.

    The parts of a complete call concatenate to one JSON object.
    """

    index: int
    name: str | None
    arguments: str


Event = ReasoningDelta | TextDelta | CallDelta
"""More of a message. Events are in the order in which the model wrote them."""


class Events:
    """Collects parts of reasoning, content and calls. Consecutive parts of the same kind become one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: type[ReasoningDelta | TextDelta] | None = None  # None: the open event is of a call
        self._parts: list[str] = []
        self._index = 0
        self._name: str | None = None

    def add_text(self, kind: type[ReasoningDelta] | type[TextDelta], text: str) -> None:
        """Add to the reasoning or to the content; `text` is not empty."""
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def begin_call(self, index: int, name: str) -> None:
        """Begin a call, whose arguments follow."""
        self._flush()
        self._kind, self._index, self._name = None, index, name

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if self._kind is not None:
            self._flush()
            self._kind = None
        self._parts.append(text)

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if not self._parts and self._name is None:
            return
        text = "".join(self._parts)
        self._parts = []
        if self._kind is not None:
            self._events.append(self._kind(text))
        elif text or self._name is not None:
            self._events.append(CallDelta(self._index, self._name, text))
            self._name = None


class Flow:
    """The streamed text of a field, without the white space at both ends of the whole text.

    Adds the parts of one text to `events`. `is_blank` until it has something else than white space."""

    def __init__(self, events: Events, kind: type[ReasoningDelta] | type[TextDelta]) -> None:
        self.is_blank = True
        self._events = events
        self._kind = kind
        self._space = ""  # read, and added as soon as something follows it
        self._join: str | None = None  # replaces the white space between two parts

    def begin(self, join: str | None) -> None:
        """Begin a new region; `join` is put between it and the text before."""
        if join is not None and not self.is_blank:
            self._join, self._space = join, ""

    def write(self, text: str, *, strip: bool = True) -> None:
        """Add `text`; white space at its end is held back. Without `strip`, all of it is added at once."""
        if not text:
            return
        if not strip:
            self._events.add_text(self._kind, self._space + text)
            self._space = ""
            self.is_blank = self.is_blank and text.isspace()
            return
        if text.isspace():
            if not self.is_blank and self._join is None:
                self._space += text
            return
        if self.is_blank or self._join is not None:
            text = text.lstrip()
        kept = text.rstrip()
        self._events.add_text(self._kind, self._space + (self._join or "") + kept)
        self._space, self._join, self.is_blank = text[len(kept) :], None, False

    def forget_space(self) -> None:
        """Drop the white space at the end of the text so far, which belongs to the prompt."""
        self._space = ""
