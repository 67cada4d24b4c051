"""Input and output of a parser of responses: pieces of an output in, events of its message out."""

from typing import NamedTuple

import msgspec


class OutputPiece(NamedTuple):
    """A part of an output: ordinary text of any length, or one added token of the vocabulary and how it is spelled.

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
