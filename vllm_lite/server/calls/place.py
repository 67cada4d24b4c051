"""StreamPosition: the part of a stream that a client has received. It is the id of each event of a resumable stream, in
a form that only the server reads: a client sends the last id back, and a new response continues from there.

A position counts events of the opening and the closing, and tokens and characters of each choice. It is therefore
independent of the way in which a stream is cut into events, and of the API server that continues it.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.openai.errors import ApiError

if TYPE_CHECKING:
    from vllm_lite.server.calls.call import Call

MAX_CHOICES = 64
"""Maximum number of choices of a resumable stream: with more, the ids would be longer than the events."""
MAX_CHARS = 64 * MAX_CHOICES
"""Maximum length of an id that this server has written."""
_FORM = re.compile(r"([0-9]{1,4})-([0-2])((?:-[0-9]{1,9}\.[0-9]{1,9}!?){1,64})", re.ASCII)


class Shown:
    """The part of one choice that a client has received: tokens, characters, and its end."""

    __slots__ = ("has_ended", "num_chars", "num_tokens")

    def __init__(self, num_tokens: int = 0, num_chars: int = 0, *, has_ended: bool = False) -> None:
        self.num_tokens = num_tokens
        self.num_chars = num_chars
        self.has_ended = has_ended

    def add(self, delta: CompletionOutput) -> None:
        self.num_tokens += len(delta.token_ids)
        self.num_chars += len(delta.text)
        self.has_ended = delta.finish_reason is not None


class StreamPosition:
    """A position in a stream of events; each event moves it forward.

    `num_opened` counts events of the opening. `closing` is 0 before the closing, 1 after the usage, 2 at the end.
    """

    def __init__(self, choices: Sequence[Shown], num_opened: int = 0, closing: int = 0) -> None:
        self.choices = choices
        self.num_opened = num_opened
        self.closing = closing

    @classmethod
    def beginning(cls, num_choices: int) -> "StreamPosition":
        return cls([Shown() for _ in range(num_choices)])

    @classmethod
    def read(cls, text: str, call: "Call", num_openings: int) -> "StreamPosition":
        """Parse `text`, the last event id that a client of `call` received; "" is the beginning. The call's opening has
        `num_openings` events. Raises ApiError for a position that the stream has not reached."""
        if not text:
            return cls.beginning(len(call.choices))
        match = None if len(text) > MAX_CHARS else _FORM.fullmatch(text)
        if match is not None:
            opened, closing, choices = match.groups()
            place = cls([_shown(each) for each in choices[1:].split("-")], int(opened), int(closing))
            if place.num_opened <= num_openings and call.has_reached(place):
                return place
        given = text[:40].encode("ascii", "replace").decode() + ("..." if len(text) > 40 else "")
        raise ApiError(
            400,
            f"Last-Event-ID {given!r} is not a place in the stream of request {call.id!r}: send the id of its last "
            "event as it came, or none to have the stream from its beginning",
        )

    @property
    def is_end(self) -> bool:
        return self.closing == 2

    def mark(self, event: bytes) -> bytes:
        """Prefix `event` with this position, which includes it, as its id."""
        choices = [f"-{each.num_tokens}.{each.num_chars}{'!' if each.has_ended else ''}" for each in self.choices]
        return f"id: {self.num_opened}-{self.closing}{''.join(choices)}\n".encode() + event


def _shown(text: str) -> Shown:
    tokens, _, chars = text.partition(".")
    return Shown(int(tokens), int(chars.removesuffix("!")), has_ended=chars.endswith("!"))
