"""Reads calls whose arguments are between tags: <parameter=city>Paris</parameter>. Strings stream; other values are
sent when they are complete, as only then their type is sure."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from vllm_lite.client.text.response.calls import (
    MAX_KEY_CHARS,
    MAX_NAME_CHARS,
    MAX_UNSENT_CHARS,
    CallSink,
    PropertiesOf,
    Rejected,
)
from vllm_lite.client.text.response.contents import loose_value, schema_types
from vllm_lite.client.text.response.json_value import Malformed


@dataclass(frozen=True, slots=True)
class Tags:
    """The literals around a key and its value.

    trim        white space that is removed from both ends of a value: "line" one line break, "space" all, "" none
    kind_mark   follows a key; after it comes `text_kind` if the value is a string, another word if it is JSON
    wrap_open   may come before a value that is any text, which ends with wrap_close
    call_open   begins another call in the same region. Its name ends with name_close, and each call with call_close
    """

    key_open: str
    key_close: str
    value_close: str
    value_open: str = ""
    trim: str = "line"
    kind_mark: str = ""
    text_kind: str = "true"
    wrap_open: str = ""
    wrap_close: str = ""
    call_open: str = ""
    name_close: str = ""
    call_close: str = ""


class TaggedReader:
    """Reads tags one after another. The JSON that it sends is its own: {, a key and a value for each tag, }."""

    is_open = False
    ends_itself = False

    def __init__(self, sink: CallSink, name: str, tags: Tags, properties_of: PropertiesOf) -> None:
        self._sink = sink
        self._name = name
        self._opening = ""  # text of a call other than the first, before it begins
        self._tags = tags
        self._properties_of = properties_of
        self._properties = properties_of(name)
        self._step = self._between
        self._text = ""
        self._place = 0  # the text before it is processed
        self._seen = 0  # the search for the next literal continues here
        self._has_begun = False
        self._num_keys = 0
        self._types: tuple[str, ...] = ()
        self._value_close = tags.value_close
        self._trim = tags.trim
        self._is_new = True  # no part of the current value was sent

    @property
    def is_done(self) -> bool:
        """Whether a call is complete and no other call needs to follow."""
        return self._step == self._behind_call

    def feed(self, text: str) -> int:
        self._text += text
        while self._step():
            if len(self._text) - self._place > MAX_UNSENT_CHARS + len(text):
                raise self._rejected()
        self._text = self._text[self._place :]
        self._seen -= self._place
        self._place = 0
        if len(self._text) > MAX_UNSENT_CHARS:
            raise self._rejected()
        return len(text)

    def close(self) -> None:
        if self._step in (self._at_value, self._in_value):  # a model that forgot to close its last value
            self._end_value(len(self._text))
        elif self._text[self._place :].strip() or self._step == self._in_name:
            raise self._rejected()
        if self._step != self._behind_call:
            self._end_call()

    def cut(self) -> str:
        if not self._has_begun:
            return self._opening + self._text
        if self._step == self._in_value and self._streams:
            self._send(self._sure_end(self._value_close), is_last=True)
        return ""

    # ---- one step each: find the next literal and process the text before it; False if there is none yet

    def _between(self) -> bool:
        call_close = self._tags.call_close
        if call_close and self._begins_with(call_close):
            self._end_call()
            self._go_on(self._text.index(call_close, self._place) + len(call_close), self._behind_call)
            return True
        found = self._find_next(self._tags.key_open, *([call_close] if call_close else ()))
        if found < 0:
            return False
        self._begin()
        self._go_on(found + len(self._tags.key_open), self._in_key)
        return True

    def _behind_call(self) -> bool:
        found = self._find_next(self._tags.call_open)
        if found < 0:
            return False
        self._opening = self._tags.call_open
        self._go_on(found + len(self._tags.call_open), self._in_name)
        return True

    def _in_name(self) -> bool:
        found = self._find(self._tags.name_close)
        if (len(self._text) if found < 0 else found) - self._place > MAX_NAME_CHARS:
            raise self._rejected()
        if found < 0:
            return False
        self._name = self._text[self._place : found]
        self._opening += self._name + self._tags.name_close
        self._properties = self._properties_of(self._name)
        self._num_keys = 0
        self._go_on(found + len(self._tags.name_close), self._between)
        return True

    def _in_key(self) -> bool:
        found = self._find(self._tags.key_close)
        if (len(self._text) if found < 0 else found) - self._place > MAX_KEY_CHARS:
            raise self._rejected()
        if found < 0:
            return False
        key, kind = self._text[self._place : found].strip(), ""
        if self._tags.kind_mark:
            key, _, kind = key.partition(self._tags.kind_mark)
        self._types = schema_types(self._properties.get(key))
        if kind:
            self._types = ("string",) if kind == self._tags.text_kind else ()
        self._value_close, self._trim = self._tags.value_close, self._tags.trim
        self._sink.write(("{" if not self._num_keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_keys += 1
        self._is_new = True
        behind = self._before_value if self._tags.value_open else self._at_value
        self._go_on(found + len(self._tags.key_close), behind)
        return True

    def _before_value(self) -> bool:
        found = self._find(self._tags.value_open)
        if found < 0:
            return False
        self._go_on(found + len(self._tags.value_open), self._at_value)
        return True

    def _at_value(self) -> bool:
        wrap_open = self._tags.wrap_open
        if wrap_open and self._text.startswith(wrap_open, self._place):
            self._value_close, self._trim = self._tags.wrap_close + self._tags.value_close, ""
            self._go_on(self._place + len(wrap_open), self._in_value)
            return True
        if wrap_open and wrap_open.startswith(self._text[self._place :]):
            return False
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        found = self._find(self._value_close)
        if found < 0:
            if self._streams:
                self._send(self._sure_end(self._value_close), is_last=False)
            return False
        self._end_value(found)
        self._go_on(found + len(self._value_close), self._between)
        return True

    # ---- values

    @property
    def _streams(self) -> bool:
        return self._types == ("string",)

    def _end_value(self, end: int) -> None:
        if self._streams:
            self._send(end, is_last=True)
            self._sink.write('""' if self._is_new else '"')
            return
        value = loose_value(self._trimmed(self._text[self._place : end]), self._types)
        self._sink.write(json.dumps(value, ensure_ascii=False))
        self._place = end

    def _send(self, end: int, *, is_last: bool) -> None:
        """Send the string up to `end`, except for characters that may have to be trimmed."""
        text = self._trimmed(self._text[self._place : end], start=self._is_new, end=False)
        part = self._trimmed(text, start=False)
        if not part:
            return
        self._place = end - len(text) + len(part)
        self._sink.write(('"' if self._is_new else "") + json.dumps(part, ensure_ascii=False)[1:-1])
        self._is_new = False
        if is_last:
            self._place = end

    def _trimmed(self, text: str, *, start: bool = True, end: bool = True) -> str:
        match self._trim:
            case "space":
                text = text.lstrip() if start else text
                return text.rstrip() if end else text
            case "line":
                text = text.removeprefix("\n") if start else text
                return text.removesuffix("\n") if end else text
        return text

    # ---- the text

    def _find(self, literal: str) -> int:
        found = self._text.find(literal, max(self._place, self._seen - len(literal)))
        self._seen = len(self._text)
        return found

    def _find_next(self, literal: str, *others: str) -> int:
        """Find `literal` after nothing but white space, or one of `others`. Raises Rejected."""
        found = self._find(literal)
        end = min(self._sure_end(each) for each in (literal, *others)) if found < 0 else found
        if self._text[self._place : end].strip():
            raise self._rejected()
        return found

    def _begins_with(self, literal: str) -> bool:
        """Whether `literal` comes next, after white space."""
        return self._text[self._place :].lstrip().startswith(literal)

    def _sure_end(self, literal: str) -> int:
        """End of the text that cannot belong to a beginning of `literal`."""
        for length in range(min(len(literal) - 1, len(self._text) - self._place), 0, -1):
            if self._text.endswith(literal[:length]):
                return len(self._text) - length
        return len(self._text)

    def _go_on(self, place: int, step: Callable[[], bool]) -> None:
        self._place = self._seen = place
        self._step = step

    def _begin(self) -> None:
        if not self._has_begun:
            try:
                self._sink.begin(self._name, 0)
            except Malformed as error:
                raise self._rejected() from error
            self._has_begun = True
            self._opening = ""

    def _end_call(self) -> None:
        self._begin()
        self._sink.write("}" if self._num_keys else "{}")
        self._has_begun = False

    def _rejected(self) -> Rejected:
        """Complete the arguments that were begun, because the sent JSON is our own; the rest of the text is unused."""
        if self._has_begun and self._step == self._between:
            self._sink.write("}" if self._num_keys else "{}")
        return Rejected(self._opening + self._text[self._place :])
