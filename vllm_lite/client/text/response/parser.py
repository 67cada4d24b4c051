"""ResponseParser: the pieces of one output in, the deltas of its message out.

It goes over the text once. In every state it looks for a few delimiters: outside of fields for what opens one, inside
a field for what closes it. Text that may be the beginning of a delimiter waits for what follows; all other text goes
to its field at once. A call that proves to be none is text again, from where it was not sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_lite.client.text.response.calls import CallReader, CallSink, Rejected
from vllm_lite.client.text.response.flow import Flow
from vllm_lite.client.text.response.pieces import Delta, Piece
from vllm_lite.client.text.response.readers import reader_of
from vllm_lite.client.text.response.template import MAX_HELD_CHARS, Delimiter, Field, Format

MAX_PREFIX_CHARS = 65_536
"""How much of the end of a prompt is looked at for what begins the message."""
MAX_STILL = 8
"""How often fields may open and close without any text between, before a character is taken as text."""


class _Found(NamedTuple):
    start: int
    end: int
    opens: bool
    field: Field
    captures: dict[str, str]


class ResponseParser:
    """Takes one output apart. One per sample; it is fed everything in order and then finished once."""

    def __init__(
        self, response_format: Format, prefix: str = "", tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """`prefix` is the rendered prompt, whose end may have begun the message. `tools` are those of the request
        ({"type": "function", "function": {...}}); without any, what looks like a call is content."""
        self._format = response_format
        self._marks = response_format.marks
        self._fields = [field for field in response_format.fields if field.open and (tools or field.role != "calls")]
        self._properties = properties_of(tools or ())
        self._text = ""
        self._place = 0
        self._field = response_format.content
        self._content = Flow()
        self._reasoning = Flow()
        self._sink = CallSink(response_format.marks)
        self._reader: CallReader | None = None
        self._opening = ""
        self._num_before = 0  # calls before the current region of calls
        self._num_still = 0
        self._is_broken = False
        self.has_reasoned = False
        """Whether reasoning was closed."""
        self._prime(prefix)

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning."""
        return self._field.role == "reasoning"

    def feed(self, pieces: Sequence[Piece]) -> Delta:
        """Take the next pieces. Returns what is certain now and was not before."""
        self._text += self._marks.text(pieces)
        self._run(is_last=False)
        return self._take()

    def finish(self) -> Delta:
        """The output is over: what is open is closed as it is. Returns the rest."""
        if self._reader is not None and self._reader.is_done:
            self._text = ""  # what waits behind complete calls is the beginning of the literal that closes them
        self._run(is_last=True)
        if self._reader is not None:
            self._end_reader(self._reader)
        return self._take()

    def _take(self) -> Delta:
        return Delta(self._reasoning.take(), self._content.take(), self._sink.take())

    # ---- the end of the prompt

    def _prime(self, prefix: str) -> None:
        tail = self._message_begun(prefix)
        self._text = tail
        self._run(is_last=False)
        self._content.forget()
        self._reasoning.forget()
        self._place, self._text = 0, self._text[self._place :]
        starts_in = self._format.starts_in
        if starts_in is not None and self._field is self._format.content and not tail.strip():
            self._field = starts_in

    def _message_begun(self, prefix: str) -> str:
        """Cut off what a prompt has of the message: all behind the last anchor; without one, a literal of the reasoning
        at its very end."""
        text = self._marks.literal(prefix[-MAX_PREFIX_CHARS:])
        anchor = self._format.anchor
        if anchor is not None:
            try:
                ends = [found.end() for found in anchor.pattern.finditer(text, timeout=anchor.seconds)]
            except TimeoutError:
                ends = []
            if ends:
                return text[ends[-1] :]
        end = text.rstrip()
        opening, closing = map(self._marks.literal, self._format.thinking or ("", ""))
        if opening and end.endswith(opening):
            return text[len(end) - len(opening) :]
        if closing and end.endswith(closing):
            return opening + text[len(end) - len(closing) :]
        return ""

    # ---- one pass

    def _run(self, *, is_last: bool) -> None:
        try:
            while self._step(is_last=is_last):
                pass
        except TimeoutError:  # a pattern of the checkpoint: from here on there are no delimiters
            self._give_up()
        self._text, self._place = self._text[self._place :], 0

    def _step(self, *, is_last: bool) -> bool:
        """Take the text up to the next delimiter, and the delimiter. Returns whether to go on."""
        found, sure_end = self._scan(is_last=is_last)
        end = sure_end if found is None else found.start
        before = self._place, self._field
        if end > self._place:
            field, self._num_still = self._field, 0
            self._write(end)
            if self._field is not field or self._place < end:
                return True
        if found is None:
            return False
        if self._reader is not None and self._reader.is_open and self._field.close and self._field.close.is_text:
            self._write(end + 1)
            return True
        self._pass(found)
        self._num_still = self._num_still + 1 if (self._place, end) == (before[0], found.end) else 0
        if self._num_still > MAX_STILL:
            self._num_still = 0
            if self._place == len(self._text):
                return False
            self._write(self._place + 1)
        return True

    def _scan(self, *, is_last: bool) -> tuple[_Found | None, int]:
        """Find the first delimiter, the longest of those that begin there, and where text begins that may become one.

        Raises TimeoutError for a pattern that takes too long.
        """
        if self._is_broken or self._place == len(self._text):
            return None, len(self._text)
        best: _Found | None = None
        best_key: tuple[int, int, bool, str] | None = None
        pending = len(self._text)
        for field, delimiter, opens in self._watched():
            found = self._search(field, delimiter, is_last=is_last)
            if found is None:
                continue
            if not is_last and delimiter.is_pending(found, len(self._text)):
                if len(self._text) - found.start() <= MAX_HELD_CHARS:
                    pending = min(pending, found.start())
                continue
            key = (found.start(), found.start() - found.end(), not opens, field.name)
            if best_key is None or key < best_key:
                captures = {name: text for name, text in found.groupdict().items() if text is not None}
                best, best_key = _Found(found.start(), found.end(), opens, field, captures), key
        return (best if best is not None and best.start < pending else None), pending

    def _watched(self) -> list[tuple[Field, Delimiter, bool]]:
        field = self._field
        if field is self._format.content:
            watched = [(item, item.open, True) for item in self._fields if item.open]
        elif field is self._format.starts_in and field.open and self._reasoning.is_blank:
            watched = [(field, field.open, True)]
        else:
            watched = []
        return [*watched, (field, field.close, False)] if field.close else watched

    def _search(self, field: Field, delimiter: Delimiter, *, is_last: bool) -> Any:
        if not field.at_start or field is self._field:
            return delimiter.search(self._text, self._place, is_last=is_last)
        if not self._content.is_blank:
            return None
        rest = self._text[self._place :]
        start = len(self._text) - len(rest.lstrip())
        return delimiter.match(self._text, start, is_last=is_last) if start < len(self._text) else None

    # ---- text and delimiters

    def _write(self, end: int) -> None:
        """Hand the text up to `end` to the current field. A reader may take less of it; then the field ends."""
        text = self._text[self._place : end]
        if self._reader is None:
            flow = self._reasoning if self._field.role == "reasoning" else self._content
            flow.write(self._marks.spell(text), strip=self._field.arguments.get("strip", True) is not False)
            self._place = end
            return
        try:
            taken = self._reader.feed(text)
        except Rejected as error:
            self._place = end
            self._reject(error.rest)
            return
        self._place += taken
        rest = text[taken:]
        if self._reader.is_done and (rest.strip() or (rest and self._field.close is None)):
            self._place += len(rest) - len(rest.lstrip()) if self._field.close else 0
            self._leave()
        else:
            self._place = end

    def _pass(self, found: _Found) -> None:
        self._place = found.end
        if found.opens:
            if found.field is not self._field and found.field.role != "skipped":
                self._enter(found)
            return
        reader, self_closed = self._reader, self._field
        self._leave()
        if reader is None or reader.is_done:
            return
        try:
            reader.close()
        except Rejected as error:
            if self._sink.num_calls == self._num_before:
                self._field, self._reader = self_closed, reader
                self._place = found.start
                self._reject(error.rest)
            else:
                self._content.write(self._marks.spell(error.rest))

    def _enter(self, found: _Found) -> None:
        self._field = field = found.field
        if field.role == "reasoning":
            self._reasoning.begin(field.join)
        elif field.role == "content":
            self._content.begin(field.join)
        else:
            self._opening = self._text[found.start : found.end]
            self._num_before = self._sink.num_calls
            self._reader = reader_of(field, found.captures, self._sink, self._marks, self._properties)

    def _leave(self) -> None:
        self.has_reasoned = self.has_reasoned or self._field.role == "reasoning"
        self._field, self._reader = self._format.content, None
        self._content.begin(self._field.join)

    def _reject(self, rest: str) -> None:
        """This is no call, or no more of one: what was not sent of it is text, in which a call may begin again."""
        has_sent = self._sink.num_calls > self._num_before
        opening = "" if has_sent else self._opening
        self._field, self._reader = self._format.content, None
        self._text, self._place = rest + self._text[self._place :], 0
        if not opening and not has_sent:
            opening, self._place = self._text[:1], min(1, len(self._text))
        self._content.write(self._marks.spell(opening))

    def _end_reader(self, reader: CallReader) -> None:
        """Close calls whose end is the end of the output; others stay as they are."""
        rest = ""
        if not reader.is_done:
            if self._field.close is None and not reader.ends_itself:
                try:
                    reader.close()
                except Rejected as error:
                    rest = error.rest
            else:
                rest = reader.cut()
        opening = self._opening if self._sink.num_calls == self._num_before and not reader.is_done else ""
        self._reader = None
        self._content.write(self._marks.spell(opening + rest))

    def _give_up(self) -> None:
        self._is_broken = True
        if self._reader is not None:
            self._reject(self._reader.cut())
        self._write(len(self._text))


def properties_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Map the names of tools to the schemas of their parameters by name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found
