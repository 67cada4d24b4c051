"""Common parts of the readers of tool calls: the sink for their calls, and the interface of a reader."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm_lite.client.text.response.events import Events
from vllm_lite.client.text.response.json_value import Malformed
from vllm_lite.client.text.response.marks import Marks

PropertiesOf = Callable[[str], Mapping[str, Any]]
"""Returns the JSON schemas of a tool's parameters by the tool's name; {} for an unknown tool."""
MAX_UNSENT_CHARS = 16_384
"""Maximum characters of a call that wait for its name, or of a value that wait for its end. A longer one is content."""
MAX_WHOLE_CHARS = 1_048_576
MAX_NAME_CHARS = 256
MAX_KEY_CHARS = 1024
MAX_CALLS = 128


class CallSink:
    """Numbers the calls of one output and adds them to its events."""

    def __init__(self, marks: Marks, events: Events) -> None:
        self.num_calls = 0
        self._marks = marks
        self._events = events

    def begin(self, name: str, place: int) -> None:
        """Begin the next call. Raises Malformed at `place` for an invalid name."""
        name = self._marks.spell(name).strip()
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or self.num_calls >= MAX_CALLS:
            raise Malformed(place)
        self._events.begin_call(self.num_calls, name)
        self.num_calls += 1

    def write(self, arguments: str) -> None:
        """Add to the arguments of the current call."""
        if arguments:
            self._events.add_arguments(self._marks.spell_in_json(arguments))


class Rejected(Exception):
    """A call contradicts its format. Parts that were sent stay valid; `rest` is all text that was read and not sent."""

    def __init__(self, rest: str) -> None:
        super().__init__(f"not a call: {rest[:100]!r}")
        self.rest = rest


class CallReader(Protocol):
    """Reads the text between the literals of a call, and sends it to a sink as it arrives.

    A name is sent as soon as nothing but its arguments can follow. All methods raise Rejected.
    """

    ends_itself: bool
    """Whether the text itself shows that the calls are complete."""

    @property
    def is_done(self) -> bool:
        """Whether the text has shown that the calls are complete."""

    @property
    def is_open(self) -> bool:
        """Whether the reader is inside a text that may spell the closing literal."""

    def feed(self, text: str) -> int:
        """Read `text`. Returns the number of its characters that belong to the calls: fewer than all once they are
        complete."""

    def close(self) -> None:
        """Take the closing literal."""

    def cut(self) -> str:
        """End at the end of the output: send what is certain, and return the text of a call that has no name yet."""


class WholeReader:
    """Keeps the text of a call until it is complete, for kinds of content that can only be read then."""

    ends_itself = False
    is_done = False
    is_open = False

    def __init__(self, sink: CallSink, calls_of: Callable[[str], list[tuple[str, str]]]) -> None:
        """`calls_of` reads names and arguments from the whole text; it raises ValueError if it cannot."""
        self._sink = sink
        self._calls_of = calls_of
        self._parts: list[str] = []
        self._num_chars = 0

    def feed(self, text: str) -> int:
        self._parts.append(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_WHOLE_CHARS:
            raise Rejected("".join(self._parts))
        return len(text)

    def close(self) -> None:
        text = "".join(self._parts)
        try:
            for name, arguments in self._calls_of(text):
                self._sink.begin(name, 0)
                self._sink.write(arguments)
        except (ValueError, Malformed) as error:
            raise Rejected(text) from error

    def cut(self) -> str:
        try:
            self.close()
        except Rejected as error:
            return error.rest
        return ""
