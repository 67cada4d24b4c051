"""Calls whose arguments stand between tags: <parameter=city>Paris</parameter>. Strings stream; other values are sent
when they are complete, as only then their type is sure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_lite.client.text.response.calls import MAX_KEY_CHARS, MAX_UNSENT_CHARS, CallSink, Rejected
from vllm_lite.client.text.response.contents import loose_value, schema_types
from vllm_lite.client.text.response.json_value import Malformed


@dataclass(frozen=True, slots=True)
class Tags:
    """The literals around a key and its value. `trim` says what is no part of a value: "line" takes one line break
    from each end, "space" all white space, "" nothing."""

    key_open: str
    key_close: str
    value_close: str
    value_open: str = ""
    trim: str = "line"


class TaggedReader:
    """Reads tags one after another. The JSON that it sends is its own: {, a key and a value for each tag, }."""

    is_open = False
    is_done = False
    ends_itself = False

    def __init__(self, sink: CallSink, name: str, tags: Tags, properties: Mapping[str, Any]) -> None:
        """`properties` are the schemas of the tool's parameters."""
        self._sink = sink
        self._name = name
        self._tags = tags
        self._properties = properties
        self._step = self._between
        self._text = ""
        self._place = 0  # what stands before it in the text is used
        self._seen = 0  # the search for the next literal goes on here
        self._has_begun = False
        self._num_keys = 0
        self._types: tuple[str, ...] = ()
        self._is_new = True  # no part of the current value was sent

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
        if self._step == self._in_value:  # a model that forgot to close its last value
            self._end_value(len(self._text))
        elif self._text[self._place :].strip():
            raise self._rejected()
        self._begin()
        self._sink.write("}" if self._num_keys else "{}")

    def cut(self) -> str:
        if not self._has_begun:
            return self._text
        if self._step == self._in_value and self._streams:
            self._send(self._sure_end(self._tags.value_close), is_last=True)
        return ""

    # ---- one step each: find the next literal and use what stands before it; False if there is none yet

    def _between(self) -> bool:
        found = self._find(self._tags.key_open)
        end = self._sure_end(self._tags.key_open) if found < 0 else found
        if self._text[self._place : end].strip():
            raise self._rejected()
        if found < 0:
            return False
        self._begin()
        self._go_on(found + len(self._tags.key_open), self._in_key)
        return True

    def _in_key(self) -> bool:
        found = self._find(self._tags.key_close)
        if (len(self._text) if found < 0 else found) - self._place > MAX_KEY_CHARS:
            raise self._rejected()
        if found < 0:
            return False
        key = self._text[self._place : found].strip()
        self._types = schema_types(self._properties.get(key))
        self._sink.write(("{" if not self._num_keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_keys += 1
        self._is_new = True
        self._go_on(found + len(self._tags.key_close), self._before_value if self._tags.value_open else self._in_value)
        return True

    def _before_value(self) -> bool:
        found = self._find(self._tags.value_open)
        if found < 0:
            return False
        self._go_on(found + len(self._tags.value_open), self._in_value)
        return True

    def _in_value(self) -> bool:
        found = self._find(self._tags.value_close)
        if found < 0:
            if self._streams:
                self._send(self._sure_end(self._tags.value_close), is_last=False)
            return False
        self._end_value(found)
        self._go_on(found + len(self._tags.value_close), self._between)
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
        """Send the string up to `end` but for what may turn out to be trimmed."""
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
        match self._tags.trim:
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

    def _sure_end(self, literal: str) -> int:
        """Where the text ends that cannot be the beginning of `literal`."""
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

    def _rejected(self) -> Rejected:
        """What has begun is completed, as the JSON is our own; the rest is what was not used."""
        if self._has_begun and self._step == self._between:
            self._sink.write("}" if self._num_keys else "{}")
        return Rejected(self._text[self._place :])
