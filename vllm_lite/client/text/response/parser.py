"""ResponseParser: turns the pieces of one output into the events of its message.

It goes over the text once. In every state it searches for a few delimiters: outside of fields for those that open one,
inside a field for those that close it. Text that may be the beginning of a delimiter is held back; all other text goes
to its field at once. If a call turns out to be invalid, its text that was not sent becomes text again. So all events
together do not depend on how the output was cut into pieces.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_lite.client.text.response.arguments import arguments_of
from vllm_lite.client.text.response.calls import CallReader, CallSink, Rejected
from vllm_lite.client.text.response.events import CallDelta, Event, Events, Flow, OutputPiece, ReasoningDelta, TextDelta
from vllm_lite.client.text.response.readers import reader_of
from vllm_lite.client.text.response.scan import Found, Scanner, WatchedMark, message_begun, scanner
from vllm_lite.client.text.response.template import Field, Format

MAX_STILL = 8
"""Maximum number of fields that open and close without text in between, after which a character is taken as text."""
MAX_RUN_CHARS = 4096
"""Characters that are scanned at a time; text that waits for the end of a delimiter is scanned again."""


@dataclass(frozen=True, slots=True)
class _Region:
    """The field that the text belongs to from here on.

    field       the field
    reader      reads it, if it is one of calls
    opening     the literal that opened it, which is text again if there is no call behind it
    num_before  calls of the output before it
    """

    field: Field
    reader: CallReader | None = None
    opening: str = ""
    num_before: int = 0


MAX_TAIL_CHARS = 131_072
"""Maximum characters of a tail; a longer one is reasoning, like all text after it."""
MAX_TAILS = 32
"""Maximum number of tails in one output that prove to be no calls; each is parsed again."""
MAX_TAILS_AT_END = 4
"""Maximum number of tails that prove to be no calls only at the end of the output, where all are parsed at once."""


class Tail:
    """Text inside reasoning, from a literal on, that may be the calls at the end of the output: some models write a
    call and stop without ending their thinking.

    It is held back, and parsed as if it were content. If only complete calls of known tools follow up to the end of the
    output, they are the calls of the message; otherwise all of it was reasoning.
    """

    def __init__(self, parser: "ResponseParser", names: Container[str], opening: str) -> None:
        """`names`: names of the tools that may be called."""
        self.opening = opening
        self.is_long = False
        self._parser = parser
        self._names = names
        self._parts: list[str] = []
        self._num_chars = 0
        self._calls: list[tuple[str, list[str]]] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, text: str) -> bool:
        """Take more text; the opening comes first. Returns whether all of it may still be calls."""
        self._parts.append(text)
        room = MAX_TAIL_CHARS - self._num_chars
        self._num_chars += len(text)
        is_good = self._take(self._parser.feed_text(text[:room]))
        self.is_long = is_good and len(text) > room
        return is_good and not self.is_long

    def finish(self) -> list[tuple[str, str]] | None:
        """End the output. Returns names and arguments of the calls; None unless the text is complete calls only."""
        if not self._take(self._parser.finish()) or not self._calls:
            return None
        calls = [(name, "".join(parts)) for name, parts in self._calls]
        return calls if all(arguments_of(text) is not None for _, text in calls) else None

    def _take(self, events: list[Event]) -> bool:
        for event in events:
            if not isinstance(event, CallDelta):
                return False
            if event.name is not None:
                if event.name not in self._names:
                    return False
                self._calls.append((event.name, []))
            self._calls[-1][1].append(event.arguments)
        return True


class ResponseParser:
    """Takes one output apart. One per sample; it is fed everything in order and then finished once.

    _text, _place  text that was read; the part from `_place` on was not given to a field yet
    _region        the field that this part belongs to, up to the next delimiter
    _tail          inside reasoning: text from `_region` on that may be calls at the end of the output
    """

    def __init__(
        self,
        response_format: Format,
        prefix: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_tail: bool = False,
    ) -> None:
        """`prefix` is the rendered prompt, whose end may have begun the message. `tools` are those of the request
        ({"type": "function", "function": {...}}); without tools, text that looks like a call is content. `is_tail`: the
        text is the end of reasoning that was not closed, and is parsed as content."""
        self._format = response_format
        self._marks = response_format.marks
        self._tools = tools
        self._properties = properties_of(tools or ())
        self._text = ""
        self._place = 0
        self._events = Events()
        self._content = Flow(self._events, TextDelta)
        self._reasoning = Flow(self._events, ReasoningDelta)
        self._calls = CallSink(response_format.marks, self._events)
        self._outside = _Region(response_format.content)
        self._region = self._outside
        self._scanners: dict[tuple[Field, bool, bool], Scanner] = {}
        self._tail: Tail | None = None
        self._num_tails = MAX_TAILS  # none begins in the prompt, and none in a tail
        self._num_still = 0
        self.is_broken = False
        self.has_reasoned = False
        """Whether reasoning was closed."""
        opened = [field for field in response_format.fields if field.open and (tools or field.role != "calls")]
        self._openers = [
            WatchedMark(field, field.open, opens=True, at_start=field.at_start)
            for field in opened
            if field.open and not (is_tail and field.role == "reasoning")
        ]
        if not is_tail:
            self._prime(prefix)
            self._num_tails = 0 if tools else MAX_TAILS

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._region.field.role == "reasoning"

    def feed(self, pieces: Sequence[OutputPiece], *, is_last: bool = False) -> list[Event]:
        """Take the next pieces. Returns the events that are final now, in the order of the output; after the last
        pieces, all remaining ones."""
        self._read(self._marks.text(pieces))
        if is_last:
            self._end()
        return self._events.take()

    def feed_text(self, text: str) -> list[Event]:
        """Take text in which tokens have been replaced by marks."""
        self._read(text)
        return self._events.take()

    def finish(self) -> list[Event]:
        """End the output: open fields are closed. Returns the remaining events."""
        return self.feed((), is_last=True)

    def _read(self, text: str) -> None:
        for start in range(0, len(text), MAX_RUN_CHARS):
            self._text += text[start : start + MAX_RUN_CHARS]
            self._run(is_last=False)

    def _end(self) -> None:
        """Close open fields at the end of the output."""
        if self._region.reader is not None and self._region.reader.is_done:
            self._text = ""  # the held-back text after complete calls is the beginning of the literal that closes them
        self._run(is_last=True)
        count = 0
        while self._tail is not None:
            count += 1
            if count == MAX_TAILS_AT_END:
                self._num_tails = MAX_TAILS
            self._end_tail(self._tail)
            self._run(is_last=True)
        if self._region.reader is not None:
            self._end_reader(self._region.reader)

    def _prime(self, prefix: str) -> None:
        """Begin in the state of the message at the end of the prompt."""
        begun = message_begun(self._format, prefix)
        self._read(begun)
        self._events.take()
        self._content.forget_space()
        self._reasoning.forget_space()
        starts_in = self._format.starts_in
        if starts_in is not None and self._region is self._outside and not begun.strip():
            self._region = _Region(starts_in)

    # ---- one pass

    def _run(self, *, is_last: bool) -> None:
        """Process all text that is certain."""
        try:
            while self._step(is_last=is_last):
                pass
        except TimeoutError:  # from a pattern of the checkpoint: ignore delimiters from here on
            self._give_up()
        self._text, self._place = self._text[self._place :], 0

    def _step(self, *, is_last: bool) -> bool:
        """Process the text up to the next delimiter, and the delimiter. Returns whether to continue."""
        if self._place == len(self._text):
            return False
        found, end, again = None, len(self._text), False
        if not self.is_broken:
            found, end, again = self._scanner().scan(self._text, self._place, is_last=is_last)
        place = self._place
        if end > place:
            self._num_still = 0
            if not self._write(end):
                return True
        if found is None:
            return again
        region = self._region
        if region.reader is not None and region.reader.is_open and region.field.close and region.field.close.is_text:
            self._write(end + 1)
            return True
        self._pass(found)
        return self._goes_on(is_still=end == place and self._place == found.end == place)

    def _goes_on(self, *, is_still: bool) -> bool:
        """Whether to continue after a delimiter. If it `is_still`, it took no text and did not change the parser; after
        MAX_STILL of them a character is taken as text."""
        self._num_still = self._num_still + 1 if is_still else 0
        if self._num_still > MAX_STILL:
            self._num_still = 0
            if self._place == len(self._text):
                return False
            self._write(self._place + 1)
        return True

    def _scanner(self) -> Scanner:
        """Return the scanner for the delimiters that can end the text of the current region."""
        field = self._region.field
        may_open = may_call = False
        if field is self._outside.field:
            may_open = self._content.is_blank
        elif field.role == "reasoning" and self._tail is None:
            may_open = field is self._format.starts_in and self._reasoning.is_blank
            may_call = self._num_tails < MAX_TAILS and self._content.is_blank and not self._calls.num_calls
        key = field, may_open, may_call
        found = self._scanners.get(key)
        if found is None:
            found = self._scanners[key] = scanner(*self._watched(*key))
        return found

    def _watched(self, field: Field, may_open: bool, may_call: bool) -> list[WatchedMark]:
        """List the delimiters of a region of `field`. `may_open`: nothing was said yet that belongs to it. `may_call`:
        inside reasoning, the calls may begin that the output ends with."""
        watched: list[WatchedMark] = []
        if field is self._outside.field:
            watched = [each for each in self._openers if may_open or not each.at_start]
        elif field.role == "reasoning":
            if may_open and field.open:
                watched.append(WatchedMark(field, field.open, opens=True))
            if may_call:
                calls = [it for it in self._openers if it.field.role in ("calls", "skipped") and not it.at_start]
                watched += [it._replace(yields=True) for it in calls]
        if field.close:
            watched.append(WatchedMark(field, field.close, opens=False))
        return watched

    # ---- text and delimiters

    def _write(self, end: int) -> bool:
        """Pass the text up to `end` to the region. Returns False if it did not take all: then the rest, which may have
        changed, belongs to another region."""
        text = self._text[self._place : end]
        self._place = end
        region = self._region
        if self._tail is not None:
            return self._tail.feed(text) or self._drop_tail(self._tail)
        if region.reader is None:
            self._write_text(text, region.field)
            return True
        try:
            taken = region.reader.feed(text)
        except Rejected as error:
            self._reject(error.rest)
            return False
        rest = text[taken:]
        if region.reader.is_done and (rest.strip() or (rest and region.field.close is None)):
            self._place -= len(rest.lstrip()) if region.field.close else len(rest)
            self._leave()
            return False
        return True

    def _write_text(self, text: str, field: Field) -> None:
        """Add to the reasoning or to the content."""
        flow = self._reasoning if field.role == "reasoning" else self._content
        flow.write(self._marks.spell(text), strip=field.arguments.get("strip", True) is not False)

    def _pass(self, found: Found) -> None:
        """Process a delimiter, after all text before it."""
        self._place = found.end
        region = self._region
        if found.opens:
            if found.field is region.field:
                return
            if region.field.role == "reasoning":
                self._begin_tail(found)
            elif found.field.role != "skipped":
                self._enter(found)
            return
        if self._tail is not None:
            self._write_text(self._tail.text, region.field)
            self._tail = None
        self._leave()
        if region.reader is None or region.reader.is_done:
            return
        try:
            region.reader.close()
        except Rejected as error:
            if self._calls.num_calls == region.num_before:
                self._region, self._place = region, found.start
                self._reject(error.rest)
            else:
                self._content.write(self._marks.spell(error.rest))

    def _enter(self, found: Found) -> None:
        """Begin the region that a delimiter has opened."""
        field = found.field
        if field.role == "reasoning":
            self._reasoning.begin(field.join)
            self._region = _Region(field)
        elif field.role == "content":
            self._content.begin(field.join)
            self._region = _Region(field)
        else:
            opening = self._text[found.start : found.end]
            reader = reader_of(field, found.captures, self._calls, self._marks, self._properties)
            self._region = _Region(field, reader, opening, self._calls.num_calls)

    def _leave(self) -> None:
        """End the region: the text after it is content."""
        self.has_reasoned = self.has_reasoned or self.is_reasoning
        self._region = self._outside
        self._content.begin(self._outside.field.join)

    # ---- invalid calls

    def _reject(self, rest: str) -> None:
        """Treat `rest`, the text of a region of calls that was read and not sent, as text, in which a call may begin
        again. If nothing was sent, the opening literal becomes text as well."""
        has_sent = self._calls.num_calls > self._region.num_before
        opening = "" if has_sent else self._region.opening
        self._region = self._outside
        self._text, self._place = rest + self._text[self._place :], 0
        if not opening and not has_sent:
            opening, self._place = self._text[:1], min(1, len(self._text))
        self._content.write(self._marks.spell(opening))

    def _end_reader(self, reader: CallReader) -> None:
        """Close calls that the end of the output completes; others remain incomplete."""
        rest = ""
        if not reader.is_done:
            if self._region.field.close is None and not reader.ends_itself:
                try:
                    reader.close()
                except Rejected as error:
                    rest = error.rest
            else:
                rest = reader.cut()
        has_none = self._calls.num_calls == self._region.num_before and not reader.is_done
        opening = self._region.opening if has_none else ""
        self._region = self._outside
        self._content.write(self._marks.spell(opening + rest))

    def _give_up(self) -> None:
        """Assign all further text to the open region, or to the content."""
        self.is_broken = True
        if self._region.reader is not None:
            self._reject(self._region.reader.cut())
        self._write(len(self._text))

    # ---- calls at the end of reasoning

    def _begin_tail(self, found: Found) -> None:
        """Hold further text back, because a delimiter inside reasoning may open the calls at the end of the output."""
        self._num_tails += 1
        self._place = max(found.end, found.start + 1)
        opening = self._text[found.start : self._place]
        parser = ResponseParser(self._format, "", self._tools, is_tail=True)
        self._tail = Tail(parser, self._properties, opening)
        if not self._tail.feed(opening):
            self._drop_tail(self._tail)

    def _drop_tail(self, tail: Tail) -> bool:
        """Treat a tail as reasoning, in which another tail may begin unless it is too long. Returns False, because the
        text has changed."""
        self._tail = None
        self._num_tails = MAX_TAILS if tail.is_long else self._num_tails
        self._text, self._place = tail.text + self._text[self._place :], len(tail.opening)
        self._write_text(tail.opening, self._region.field)
        return False

    def _end_tail(self, tail: Tail) -> None:
        """End the output: the tail becomes calls if all of it consists of calls, else reasoning."""
        calls = tail.finish()
        if calls is None:
            self._drop_tail(tail)
            return
        self._tail, self._region = None, self._outside
        for name, arguments in calls:
            self._calls.begin(name, 0)
            self._calls.write(arguments)


def properties_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tool name -> parameter name -> JSON schema."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found
