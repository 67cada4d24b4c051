"""What a parser of responses takes and what it gives."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of an output: ordinary text of any length, or one added token of the vocabulary and how it is spelled.

    The text of an added token matches a literal of a format; ordinary text that only spells it does not.
    """

    text: str
    token_id: int | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of the call `index`: its name once, in the first delta of the call, then parts of its arguments.

    The parts of a complete call concatenate to one JSON object.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Delta:
    """What is new of a message. The kinds are in the order in which they were written, but not against each other."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)
