"""Output: converts generated output to the items of a response and the events of its stream.

An item is opened by its first text, and closed by the first text of another item or by the end. A call with truncated
arguments is incomplete, however the response ended.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.events import CallDelta, ReasoningDelta, TextDelta
from vllm_lite.server.openai.logprobs import AnySpelling, Candidates, candidate, likeliest
from vllm_lite.server.openai.parsing import MessageParser
from vllm_lite.server.responses.called import WrittenCall
from vllm_lite.server.responses.client_tools import Item
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.items import encrypted, item_id
from vllm_lite.server.responses.toolbox import Toolbox

_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}
_ENDS = {("apply_patch_call", "incomplete"): "in_progress"}
"""Statuses that an item type does not have, and their replacements."""


class OutputStyle(NamedTuple):
    """Style of the output: `top_logprobs` candidates for each text token, None for no logprobs; `is_encrypted`:
    reasoning is also encoded; calls are those of `tools`."""

    top_logprobs: int | None
    is_encrypted: bool
    tools: Toolbox


class Output:
    """Output of one response, built delta by delta. Without a log no events are written."""

    def __init__(
        self,
        response: dict[str, Any],
        parser: MessageParser,
        spelling: AnySpelling,
        *,
        log: EventLog | None,
        shown: OutputStyle,
    ) -> None:
        """`response` is the response object, whose `output` and status are updated here."""
        self.response = response
        self._items: list[Item] = response["output"]
        self._parser = parser
        self._spelling = spelling
        self._log = log
        self._top = shown.top_logprobs
        self._is_encrypted = shown.is_encrypted
        self._tools = shown.tools
        self._pieces: list[str] = []
        """The text of the open item."""
        self._scores: list[dict[str, Any]] = []
        """Logprobs of the open item."""
        self._held: list[Candidates] = []
        """Logprob candidates of tokens whose text is still held back by the parser."""
        self._call: WrittenCall | None = None
        """The call of the open item, if it is a call."""
        self._open: Item | None = None
        self.num_tokens = 0

    def num_bytes(self) -> int:
        """Size of the current response object as JSON."""
        return len(msgspec.json.encode(self.response))

    # ---- the stream as a whole

    def begin(self) -> None:
        """Write the first events."""
        self._add("response.created", response=self.response)
        self._add(f"response.{self.response['status']}", response=self.response)

    def start(self) -> None:
        """Mark a queued response as in progress, at its first token."""
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            self._add("response.in_progress", response=self.response)

    def feed(self, delta: CompletionOutput) -> None:
        """Add new output."""
        self.start()
        self.num_tokens += len(delta.token_ids)
        if self._top is None:
            self._feed(delta)
            return
        for each in delta.singly():  # token by token, so that each text has the logprobs of its own tokens
            self._held += each.logprobs or ()
            self._feed(each)

    def _feed(self, delta: CompletionOutput) -> None:
        for event in self._parser.feed(delta):
            if isinstance(event, TextDelta):
                self._text("message", event.text)
                continue
            self._held.clear()
            if isinstance(event, ReasoningDelta):
                self._text("reasoning", event.text)
            else:
                self._called(event)

    def finish(self, status: str, usage: dict[str, Any], **more: Any) -> None:
        """End with `status`; `more` are fields of the response."""
        if not self._items and status != "failed":  # clients expect a text item, even if empty
            self._opened_text("message")
        self._close("completed" if status == "completed" else "incomplete")
        self.response.update(status=status, usage=usage, **more)
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        # Streams have no event for a cancelled response: its status says so.
        self._add(f"response.{'incomplete' if status == 'cancelled' else status}", response=self.response)

    @property
    def num_reasoning(self) -> int:
        return self._parser.num_reasoning

    # ---- items

    def _text(self, kind: str, text: str) -> None:
        """Append text to the open item of this kind, or open one."""
        if self._open is None or self._open["type"] != kind:
            self._opened_text(kind)
        self._pieces.append(text)
        more: dict[str, Any] = {}
        if kind == "message":
            new = [self._scored(each) for each in self._held]
            self._held.clear()
            self._scores += new
            more["logprobs"] = [_short(each) for each in new]
        self._add_to_item(f"response.{_TEXT[kind]}.delta", content_index=0, delta=text, **more)

    def _called(self, event: CallDelta) -> None:
        """Open the item of a call, or append to its arguments."""
        if event.name is not None:
            written = WrittenCall(self._tools.tool(event.name), self._parser.id_of(event))
            self._opened(written.kind, **written.opened())
            self._call = written
        if self._call is not None and event.arguments:
            self._add_to_call(self._call, self._call.feed(event.arguments))

    def _add_to_call(self, call: WrittenCall, delta: str) -> None:
        if delta and call.events is not None:
            self._add_to_item(f"response.{call.events}.delta", delta=delta)

    def _opened_text(self, kind: str) -> None:
        shape: Item = {"role": "assistant", "content": []} if kind == "message" else {"summary": []}
        self._opened(kind, **shape)
        self._add_to_item("response.content_part.added", content_index=0, part=self._part(kind, "", []))

    def _opened(self, kind: str, **fields: Any) -> None:
        self._close("completed")
        name = item_id(kind, self.response["id"], len(self._items), is_input=False)
        self._open = {"type": kind, "id": name, "status": "in_progress", **fields}
        self._items.append(self._open)
        self._add("response.output_item.added", output_index=len(self._items) - 1, item=self._open)

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        kind, text, call = item["type"], "".join(self._pieces), self._call
        if call is not None:
            fields, rest = call.close()
            self._add_to_call(call, rest)
            item.update(fields)
            status = status if call.is_whole else "incomplete"
            if call.events is not None:
                self._add_to_item(f"response.{call.events}.done", **call.done(item))
        else:
            more = {"logprobs": [_short(each) for each in self._scores]} if kind == "message" else {}
            self._add_to_item(f"response.{_TEXT[kind]}.done", content_index=0, text=text, **more)
            part = self._part(kind, text, self._scores)
            item["content"] = [part]
            self._add_to_item("response.content_part.done", content_index=0, part=part)
            if kind == "reasoning" and self._is_encrypted:
                item["encrypted_content"] = encrypted(text)
        item["status"] = _ENDS.get((kind, status), status)
        self._add("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None
        self._pieces, self._scores, self._call = [], [], None

    def _part(self, kind: str, text: str, scores: Sequence[Any]) -> Item:
        part = {"type": _TEXT[kind], "text": text}
        return {**part, "annotations": [], "logprobs": list(scores)} if kind == "message" else part

    def _scored(self, candidates: Candidates) -> dict[str, Any]:
        token_id = next(iter(candidates))
        top = [candidate(other, it, self._spelling) for other, it in likeliest(candidates, self._top or 0)]
        return {**candidate(token_id, candidates[token_id], self._spelling), "top_logprobs": top}

    # ---- events

    def _add_to_item(self, kind: str, **fields: Any) -> None:
        if self._open is not None:
            self._add(kind, item_id=self._open["id"], output_index=len(self._items) - 1, **fields)

    def _add(self, kind: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.add(kind, **fields)


def _short(scored: dict[str, Any]) -> dict[str, Any]:
    """Drop the bytes, which a stream's logprobs do not have."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in scored["top_logprobs"]]
    return {"token": scored["token"], "logprob": scored["logprob"], "top_logprobs": top}
