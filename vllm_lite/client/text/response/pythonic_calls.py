"""Reads calls in Python: [get_weather(city="Paris", days=3), now()]. Each argument is sent when it is complete."""

import json
import re
from typing import Any

from vllm_lite.client.text.response.calls import MAX_UNSENT_CHARS, CallSink, PropertiesOf, Rejected
from vllm_lite.client.text.response.contents import coerced, python_literal, schema_types
from vllm_lite.client.text.response.json_value import MAX_DEPTH, Malformed

_WORD = re.compile(r"[\w.\-]+")
_PLAIN = re.compile(r"""[^'"\\()\[\]{},]+""")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}


class PythonicReader:
    """Reads a list of calls whose arguments are all named and literal."""

    ends_itself = True

    def __init__(self, sink: CallSink, properties_of: PropertiesOf) -> None:
        self.is_done = False
        self._properties_of = properties_of
        self._sink = sink
        self._step = self._open
        self._called = ""
        self._word = ""
        self._value: list[str] = []
        self._num_value = 0
        self._stack: list[str] = []
        self._quote = ""
        self._num_arguments = 0
        self._has_begun = False
        self._unsent: list[str] = []
        self._num_unsent = 0

    @property
    def is_open(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and not self.is_done:
            sent = self._has_begun
            try:
                end = self._step(text, place)
            except Malformed as error:
                raise self._rejected(text[place:]) from error
            if self._has_begun:
                self._unsent, self._num_unsent = [], 0
            elif not sent:
                self._unsent.append(text[place:end])
                self._num_unsent += end - place
            place = end
            if self._num_unsent + self._num_value + len(self._word) > MAX_UNSENT_CHARS:
                raise self._rejected(text[place:])
        return place

    def close(self) -> None:
        if not self.is_done:
            raise self._rejected("")

    def cut(self) -> str:
        return "" if self._has_begun else "".join(self._unsent)

    def _rejected(self, rest: str) -> Rejected:
        """Complete a call that was begun with the arguments so far, because the sent JSON is our own."""
        if self._has_begun:
            self._sink.write("}" if self._num_arguments else "{}")
            key = f"{self._word}=" if self._value and self._word else self._word
            return Rejected(key + "".join(self._value) + rest)
        return Rejected("".join(self._unsent) + rest)

    # ---- one step each, which reads at least one character

    def _open(self, text: str, place: int) -> int:
        if text[place] == "[":
            self._step = self._name
        elif not text[place].isspace():
            raise Malformed(place)
        return place + 1

    def _name(self, text: str, place: int) -> int:
        letter = text[place]
        word = _WORD.match(text, place)
        if word is not None:
            self._word += word[0]
            return word.end()
        if letter == "(" and self._word:
            self._called, self._num_arguments, self._word = self._word, 0, ""
            self._step = self._key
        elif letter == "]" and not self._word:
            self.is_done = True
        elif not letter.isspace():
            raise Malformed(place)
        return place + 1

    def _key(self, text: str, place: int) -> int:
        letter = text[place]
        word = _WORD.match(text, place)
        if word is not None:
            self._word += word[0]
            return word.end()
        if letter == "=" and self._word:
            self._step = self._in_value
        elif letter == ")" and not self._word:
            self._begin(place)
            self._end_call()
        elif not letter.isspace():
            raise Malformed(place)
        return place + 1

    def _in_value(self, text: str, place: int) -> int:
        letter = text[place]
        plain = _PLAIN.match(text, place)
        if plain is not None:
            return self._add(plain[0], place)
        if letter == "\\" or (self._value and self._value[-1] == "\\"):
            return self._add(letter, place) if self._value[-1:] != ["\\"] else self._add_escaped(letter, place)
        if self._quote:
            if letter == self._quote:
                self._quote = ""
        elif letter in "\"'":
            self._quote = letter
        elif letter in _PAIRS:
            self._stack.append(_PAIRS[letter])
            if len(self._stack) > MAX_DEPTH:
                raise Malformed(place)
        elif self._stack:
            if letter != "," and letter != self._stack.pop():
                raise Malformed(place)
        elif letter in ",)":
            return self._end_value(letter, place)
        else:
            raise Malformed(place)
        return self._add(letter, place)

    def _add_escaped(self, letter: str, place: int) -> int:
        self._value[-1] = "\\" + letter
        self._num_value += 1
        return place + 1

    def _add(self, text: str, place: int) -> int:
        if self._value and self._value[-1] == "\\":
            self._value[-1] = "\\" + text
        else:
            self._value.append(text)
        self._num_value += len(text)
        return place + len(text)

    def _end_value(self, letter: str, place: int) -> int:
        value = json.dumps(self._typed(_literal("".join(self._value), place)), ensure_ascii=False)
        self._begin(place)
        self._sink.write(("{" if not self._num_arguments else ", ") + json.dumps(self._word, ensure_ascii=False))
        self._sink.write(f": {value}")
        self._num_arguments += 1
        self._word, self._value, self._num_value = "", [], 0
        if letter == ")":
            self._end_call()
        else:
            self._step = self._key
        return place + 1

    def _typed(self, value: Any) -> Any:
        """Convert a text whose schema has another type: Llama 4's template writes all values of history in quotes."""
        types = schema_types(self._properties_of(self._called).get(self._word))
        return coerced(value, types) if isinstance(value, str) and "string" not in types else value

    def _begin(self, place: int) -> None:
        """Send the name, after the first text that can only belong to a call."""
        if not self._has_begun:
            self._sink.begin(self._called, place)
            self._has_begun = True

    def _end_call(self) -> None:
        self._sink.write("}" if self._num_arguments else "{}")
        self._has_begun = False
        self._step = self._behind

    def _behind(self, text: str, place: int) -> int:
        letter = text[place]
        if letter == "]":
            self.is_done = True
        elif letter == ",":
            self._step = self._name
        elif not letter.isspace():
            raise Malformed(place)
        return place + 1


def _literal(text: str, place: int) -> Any:
    """Read a literal of Python, or one of JSON's words. Raises Malformed."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        return python_literal(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(place) from error
