"""The message of one choice, taken apart while it arrives: content, reasoning and tool calls, as clients get them."""

import string
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.pieces import CallDelta, Delta, Piece
from vllm_lite.protocol.structured import Thinking

_LETTERS = string.ascii_letters + string.digits


class Parsing(msgspec.Struct, frozen=True):
    """How the answers of a chat are taken apart; other API servers need it to go on with a stream.

    tools              as the request has them; () where calls are not looked for
    is_forced          calls are demanded, so they are written even by a model whose own format is not known
    is_named           one tool was named: an answer that calls it ends with "stop", as OpenAI's do
    parallel           whether there may be more than one call
    include_reasoning  whether reasoning is shown
    num_calls_before   calls of earlier messages, which the ids of some formats count
    """

    tools: tuple[dict[str, Any], ...] = ()
    is_forced: bool = False
    is_named: bool = False
    parallel: bool = True
    include_reasoning: bool = True
    num_calls_before: int = 0


class CallIds:
    """The ids of one choice's calls: always the same ones, so that a stream that is gone on with repeats them."""

    def __init__(self, format_name: str | None, seed: str, num_before: int) -> None:
        """`seed` is of this choice of this answer alone."""
        self._format = format_name or ""
        self._seed = seed
        self._num_before = num_before

    def of(self, call: CallDelta) -> str:
        """The id of a call, in the form that the model's own template knows."""
        if self._format.startswith("kimi"):
            return f"functions.{call.name}:{self._num_before + call.index}"
        digest = int.from_bytes(blake2b(f"{self._seed}/{call.index}".encode()).digest(), "big")
        letters = "".join(_LETTERS[digest // 62**place % 62] for place in range(24))
        return letters[:9] if self._format.startswith("mistral") else f"call_{letters}"


class MessageParser:
    """Makes the fields of a message of what one choice generates."""

    def __init__(self, parser: ResponseParser, style: Parsing, ids: CallIds, thinking: Thinking | None) -> None:
        self._parser = parser
        self._style = style
        self._ids = ids
        self._thinking = _ThinkingCount(thinking)
        self.has_calls = False

    @property
    def num_reasoning(self) -> int:
        """Tokens of the reasoning so far."""
        return self._thinking.count

    def feed(self, delta: CompletionOutput) -> dict[str, Any]:
        """Take what is new, and return what of it is visible now: fields of a message, tool calls by index."""
        self._thinking.feed(delta.token_ids)
        found = self._parser.feed(pieces(delta))
        if delta.finish_reason is not None:
            found = _joined(found, self._parser.finish())
        return self._fields(found)

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason that a client gets where the engine gave this one."""
        return "tool_calls" if reason == "stop" and self.has_calls and not self._style.is_named else reason

    def _fields(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning and self._style.include_reasoning:
            fields |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        calls = [self._call(call) for call in delta.calls if self._style.parallel or call.index == 0]
        if calls:
            self.has_calls = True
            fields["tool_calls"] = calls
        return fields

    def _call(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": self._ids.of(call), "type": "function", "function": function}


class PlainMessage:
    """The same for a choice that is all content."""

    num_reasoning = 0
    has_calls = False

    def feed(self, delta: CompletionOutput) -> dict[str, Any]:
        return {"content": delta.text} if delta.text else {}

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class _ThinkingCount:
    """Counts the tokens of the reasoning, with those that begin and end it."""

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


def pieces(delta: CompletionOutput) -> list[Piece]:
    """Cut a text at its added tokens, of which the parser knows the ids."""
    text, found, at = delta.text, list[Piece](), 0
    for mark in delta.marks:
        if mark.start > at:
            found.append(Piece(text[at : mark.start]))
        found.append(Piece(text[mark.start : mark.end], mark.token_id))
        at = mark.end
    if at < len(text):
        found.append(Piece(text[at:]))
    return found


def _joined(first: Delta, last: Delta) -> Delta:
    """One delta of two. Parts of the same call, which follow each other, become one part."""
    calls = [*first.calls, *last.calls]
    if any(before.index == after.index for before, after in pairwise(calls)):
        merged: list[CallDelta] = []
        for call in calls:
            if merged and merged[-1].index == call.index:
                merged[-1] = CallDelta(call.index, merged[-1].name, merged[-1].arguments + call.arguments)
            else:
                merged.append(call)
        calls = merged
    return Delta(first.reasoning + last.reasoning, first.content + last.content, calls)
