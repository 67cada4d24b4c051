"""Reads calls in JSON: {"name": ..., "arguments": {...}}, a list of such objects, or only the arguments after a
name."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from vllm_lite.client.text.response.calls import MAX_UNSENT_CHARS, CallSink, Rejected
from vllm_lite.client.text.response.json_value import JSON, Dialect, JsonValue, Malformed

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The keys of an object that is a call. With `others` it may have further keys, which are skipped."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    others: tuple[str, ...] | None = None
    """Allowed further keys; None: any."""


class _Reader(ABC):
    """Passes text to the current step, which handles one structural character or value; keeps the text that is not sent
    yet."""

    ends_itself = True

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self.is_done = False
        self._unsent: list[str] = []
        self._num_unsent = 0
        self._has_begun = False
        self._is_streaming = False  # text is sent as it is read
        self._value: JsonValue | None = None

    @property
    def is_open(self) -> bool:
        return self._value is not None and self._value.in_string

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and not self.is_done:
            streamed = self._is_streaming
            try:
                end = self._step(text, place)
            except Malformed as error:
                start = error.place if streamed or self._is_streaming else place
                raise Rejected("".join(self._unsent) + text[start:]) from error
            if not (streamed or self._is_streaming):
                self._unsent.append(text[place:end])
                self._num_unsent += end - place
                if self._num_unsent > MAX_UNSENT_CHARS:
                    raise Rejected("".join(self._unsent) + text[end:])
            place = end
        return place

    def close(self) -> None:
        if not self.is_done:
            raise Rejected("".join(self._unsent))

    def cut(self) -> str:
        return "".join(self._unsent)

    @abstractmethod
    def _step(self, text: str, place: int) -> int:
        """Handle one structural character or value at `place`, and return the position after what was read. Raises
        Malformed."""

    def _begin(self, name: str, place: int) -> None:
        self._sink.begin(name, place)
        self._has_begun = True
        self._forget()

    def _forget(self) -> None:
        self._unsent, self._num_unsent = [], 0


class ArgumentsReader(_Reader):
    """Reads the arguments of a call whose name was in the opening literal."""

    def __init__(self, sink: CallSink, name: str, dialect: Dialect = JSON) -> None:
        super().__init__(sink)
        self._name = name
        self._value = JsonValue(dialect)

    def _step(self, text: str, place: int) -> int:
        value = self._value
        if value is None:
            raise Malformed(place)
        if not self._has_begun:
            if text[place] in _SPACE:
                return place + 1
            if text[place] != "{":
                raise Malformed(place)
            self._begin(self._name, place)
            self._is_streaming = True
        out: list[str] = []
        try:
            return value.feed(text, place, out)
        finally:
            self._sink.write("".join(out))
            self.is_done = value.is_done

    def close(self) -> None:
        if self._has_begun:
            super().close()
        else:  # only white space: a call without arguments
            self._sink.begin(self._name, 0)
            self._sink.write("{}")


class EnvelopeReader(_Reader):
    """One object with a name and arguments, or a list of such objects."""

    def __init__(self, sink: CallSink, envelope: Envelope) -> None:
        super().__init__(sink)
        self._envelope = envelope
        self._next: Callable[[str, int], int] = self._open
        self._is_list = False
        self._reset()

    def _reset(self) -> None:
        self._has_begun = False
        self._key = ""
        self._name = ""
        self._part = ""  # what the current value is: a key, the name, arguments that stream, or a value to be skipped
        self._held: list[str] = []  # a value that is used once it is complete
        self._early: list[str] = []  # arguments that came before the name
        self._has_arguments = False

    def _step(self, text: str, place: int) -> int:
        if self._value is not None:
            return self._feed_value(self._value, text, place)
        return place + 1 if text[place] in _SPACE else self._next(text, place)

    # ---- structure

    def _open(self, text: str, place: int) -> int:
        if text[place] == "[" and not self._is_list:
            self._is_list = True
            self._next = self._open
        elif text[place] == "{":
            self._reset()
            self._next = self._key_or_end
        else:
            raise Malformed(place)
        return place + 1

    def _end(self, place: int) -> int:
        self.is_done = True
        return place + 1

    def _key_or_end(self, text: str, place: int) -> int:
        return self._end_object(place) if text[place] == "}" else self._begin_key(text, place)

    def _begin_key(self, text: str, place: int) -> int:
        if text[place] != '"':
            raise Malformed(place)
        self._begin_value_of("key", self._colon)
        return place

    def _colon(self, text: str, place: int) -> int:
        if text[place] != ":":
            raise Malformed(place)
        self._next = self._begin_value
        return place + 1

    def _begin_value(self, text: str, place: int) -> int:
        letter = text[place]
        if self._key == self._envelope.name:
            if letter != '"' or self._name:
                raise Malformed(place)
            part = "name"
        elif self._key in self._envelope.arguments:
            if letter not in '{"n' or self._has_arguments:
                raise Malformed(place)
            self._has_arguments = True
            part = "arguments" if letter == "{" else "other arguments"
            if part == "arguments" and self._name:
                self._begin(self._name, place)
                self._is_streaming = True
        else:
            part = "skipped"
        self._begin_value_of(part, self._comma)
        return place

    def _begin_value_of(self, part: str, behind: Callable[[str, int], int]) -> None:
        self._part, self._held, self._value, self._next = part, [], JsonValue(), behind

    def _comma(self, text: str, place: int) -> int:
        if text[place] == "}":
            return self._end_object(place)
        if text[place] != ",":
            raise Malformed(place)
        self._next = self._begin_key
        return place + 1

    def _end_object(self, place: int) -> int:
        if not self._has_begun:
            if not self._name or self._envelope.others is not None:
                raise Malformed(place)
            self._begin(self._name, place)
            self._sink.write("{}")
        if not self._is_list:
            return self._end(place)
        self._next = self._comma_or_end
        return place + 1

    def _comma_or_end(self, text: str, place: int) -> int:
        if text[place] == "]":
            return self._end(place)
        if text[place] != ",":
            raise Malformed(place)
        self._next = self._open
        self._forget()
        return place + 1

    # ---- values

    def _feed_value(self, value: JsonValue, text: str, place: int) -> int:
        out: list[str] = []
        try:
            end = value.feed(text, place, out)
        finally:
            self._take("".join(out))
        if value.is_done:
            self._value = None
            self._end_value(end - 1)
        return end

    def _take(self, text: str) -> None:
        if self._part != "arguments":
            self._held.append(text)
            if self._part != "skipped":
                return
            self._held = []
        elif self._is_streaming:
            self._sink.write(text)
        else:
            self._early.append(text)

    def _end_value(self, place: int) -> None:
        held = "".join(self._held)
        if self._part == "key":
            self._key = json.loads(held)
            self._check_key(place)
        elif self._part == "name":
            self._name = json.loads(held)
            if not self._name:
                raise Malformed(place)
            self._begin_early(place)
        elif self._part == "other arguments":
            self._early = [_object(held, place)]
            self._begin_early(place)
        self._is_streaming = False

    def _begin_early(self, place: int) -> None:
        """Begin the call if both its name and its complete arguments are known."""
        if self._name and self._early:
            self._begin(self._name, place)
            self._sink.write("".join(self._early))

    def _check_key(self, place: int) -> None:
        envelope = self._envelope
        known = {envelope.name, *envelope.arguments, *(envelope.others or ())}
        if envelope.others is not None and self._key not in known:
            raise Malformed(place)


class NamedReader(EnvelopeReader):
    """Objects whose only key is the name of a call and its value the arguments, in a list: [{"f": {}}, {"g": {}}]."""

    def __init__(self, sink: CallSink) -> None:
        super().__init__(sink, Envelope())

    def _begin_value(self, text: str, place: int) -> int:
        if text[place] != "{":
            raise Malformed(place)
        self._begin(self._key, place)
        self._is_streaming = True
        self._begin_value_of("arguments", self._only_end)
        return place

    def _only_end(self, text: str, place: int) -> int:
        if text[place] != "}":
            raise Malformed(place)
        return self._end_object(place)


def _object(value: str, place: int) -> str:
    """Read arguments that are not an object: null, or the text of an object. Raises Malformed for others."""
    text = json.loads(value)
    if text is None:
        return "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise Malformed(place)
    return str(text)
