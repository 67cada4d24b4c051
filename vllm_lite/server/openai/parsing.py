"""MessageParser: splits the message of one choice into content, reasoning and tool calls while it arrives."""

import string
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Self

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.arguments import arguments_of
from vllm_lite.client.text.response.events import CallDelta, Event, OutputPiece, ReasoningDelta, TextDelta
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.protocol.structured import Thinking

_LETTERS = string.ascii_letters + string.digits


class Parsing(msgspec.Struct, frozen=True):
    """Settings for the parsing of a chat's answers; other API servers need them to continue a stream.

    tools              the request's tools; () if calls are not parsed
    is_forced          a call is required, so calls are parsed even for a model without a known format
    is_named           one tool was named: an answer that calls it ends with "stop", as OpenAI's do
    parallel           whether there may be more than one call
    include_reasoning  whether reasoning is shown
    num_calls_before   number of calls in earlier messages, which the ids of some formats count
    """

    tools: tuple[dict[str, Any], ...] = ()
    is_forced: bool = False
    is_named: bool = False
    parallel: bool = True
    include_reasoning: bool = True
    num_calls_before: int = 0


class CallIds:
    """Ids of one choice's calls. They are deterministic, so that a resumed stream repeats them."""

    def __init__(self, format_name: str | None, seed: str, num_before: int) -> None:
        """`seed` is unique to the choice."""
        self._format = format_name or ""
        self._seed = seed
        self._num_before = num_before

    def of(self, call: CallDelta) -> str:
        """The id of a call, in the format that the model's template expects."""
        if self._format.startswith("kimi"):
            return f"functions.{call.name}:{self._num_before + call.index}"
        digest = int.from_bytes(blake2b(f"{self._seed}/{call.index}".encode()).digest(), "big")
        letters = "".join(_LETTERS[digest // 62**place % 62] for place in range(24))
        return letters[:9] if self._format.startswith("mistral") else f"call_{letters}"


class MessageParser:
    """Makes events, in the client's order, of one choice's output."""

    def __init__(
        self, parser: ResponseParser | None, style: Parsing, ids: CallIds, thinking: Thinking | None = None
    ) -> None:
        """Without a `parser`, the whole output is content."""
        self._parser = parser
        self._style = style
        self._ids = ids
        self._thinking = ThinkingCount(thinking)
        self._shows_all = style.include_reasoning and style.parallel
        self._arguments: list[str] | None = None
        """Parts of the arguments of the last call, None if there is no call."""

    @classmethod
    def of_content(cls) -> Self:
        """Make a parser for a choice that is all content."""
        return cls(None, Parsing(), CallIds(None, "", 0))

    @property
    def num_reasoning(self) -> int:
        """Number of reasoning tokens so far."""
        return self._thinking.count

    @property
    def ends_in_call(self) -> bool:
        """Whether there are calls, and the last one has complete arguments."""
        return self._arguments is not None and arguments_of("".join(self._arguments)) is not None

    def id_of(self, call: CallDelta) -> str:
        """The id of a call, given its first event."""
        return self._ids.of(call)

    def feed(self, delta: CompletionOutput) -> list[Event]:
        """Parse `delta`, and return the events that are certain now."""
        if self._parser is None:
            return [TextDelta(delta.text)] if delta.text else []
        self._thinking.feed(delta.token_ids)
        events = self._parser.feed(pieces(delta), is_last=delta.finish_reason is not None)
        if not self._shows_all:
            events = [event for event in events if self._is_shown(event)]
        for event in events:
            if isinstance(event, CallDelta):
                if event.name is not None or self._arguments is None:
                    self._arguments = []
                self._arguments.append(event.arguments)
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """The client's finish reason for the engine's `reason`: "tool_calls" only after a complete call."""
        is_call = reason == "stop" and not self._style.is_named and self.ends_in_call
        return "tool_calls" if is_call else reason

    def _is_shown(self, event: Event) -> bool:
        if isinstance(event, CallDelta):
            return self._style.parallel or event.index == 0
        return self._style.include_reasoning or not isinstance(event, ReasoningDelta)


class ThinkingCount:
    """Counts the tokens of the reasoning, with its opening and closing tokens."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._is_open = thinking is not None and thinking.is_open
        self._seen: list[int] = []
        self.count = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids if self._thinking is not None else ():
            self._take(token_id, self._thinking)

    def _take(self, token_id: int, thinking: Thinking | None) -> None:
        if thinking is None:
            return
        mark = thinking.end if self._is_open else thinking.begin
        self._seen = [*self._seen, token_id][-len(mark) :] if mark else []
        if self._is_open:
            self.count += 1
        if mark and tuple(self._seen) == mark:
            self.count += 0 if self._is_open else len(mark)
            self._is_open, self._seen = not self._is_open, []


def pieces(delta: CompletionOutput) -> list[OutputPiece]:
    """Split a text at its added tokens, whose ids the parser knows."""
    text, found, at = delta.text, list[OutputPiece](), 0
    for mark in delta.marks:
        if mark.start > at:
            found.append(OutputPiece(text[at : mark.start]))
        found.append(OutputPiece(text[mark.start : mark.end], mark.token_id))
        at = mark.end
    if at < len(text):
        found.append(OutputPiece(text[at:]))
    return found
