"""The answers of /v1/messages: a message of content blocks, or its events."""

from typing import Any, Literal

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.arguments import arguments_of
from vllm_lite.client.text.response.events import CallDelta, Event, ReasoningDelta, TextDelta
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.messages import errors
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.parsing import MessageParser

_encode = msgspec.json.encode
_REASONS = {"length": "max_tokens", "abort": "pause_turn"}
"""Stop reasons by the engine's finish reasons; an aborted message can be sent back to be continued."""


class MessageWriter:
    """Writes the answer of one call, which has one choice."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, call: Call, message: MessageParser, request_id: str) -> None:
        self._call = call
        self._message = message
        self._request_id = request_id
        self._num_tokens = 0
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks = _Blocks(call.id)

    def opening(self) -> list[bytes]:
        return [_event("message_start", message=self._fields([])), self.ping]

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes:  # noqa: ARG002
        return b"".join([self._written(event) for event in self._feed(delta)])

    def closing(self) -> list[bytes]:
        delta = {**self._stop, "stop_details": None, "container": None}
        end = _event("message_delta", delta=delta, usage=self._usage())
        return [self._blocks.close(), end, _event("message_stop")]

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + _encode(errors.fields(error, self._request_id)) + b"\n\n"

    def whole(self) -> bytes:
        events = [event for _, delta in self._call.reading.deltas() for event in self._feed(delta)]
        return _encode(self._fields(self._content(events)))

    def _written(self, event: Event) -> bytes:
        """Write a new part of the output as events of the stream."""
        if isinstance(event, TextDelta):
            return self._blocks.text("text", event.text)
        if isinstance(event, ReasoningDelta):
            return self._blocks.text("thinking", event.text)
        begun = b"" if event.name is None else self._blocks.begin_call(self._message.id_of(event), event.name)
        return begun + self._blocks.arguments(event.arguments)

    def _content(self, events: list[Event]) -> list[dict[str, Any]]:
        """Content blocks of a whole message. A tool call with truncated arguments is left out."""
        blocks: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallDelta):
                if event.name is not None:
                    blocks.append(
                        {"type": "tool_use", "id": self._message.id_of(event), "name": event.name, "input": ""}
                    )
                blocks[-1]["input"] += event.arguments
                continue
            kind = "text" if isinstance(event, TextDelta) else "thinking"
            if not blocks or blocks[-1]["type"] != kind:
                more = {"citations": None} if kind == "text" else {"signature": self._call.id}
                blocks.append({"type": kind, kind: "", **more})
            blocks[-1][kind] += event.text
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = arguments_of(block["input"])
        return [block for block in blocks if block.get("input", block) is not None]

    def _feed(self, delta: CompletionOutput) -> list[Event]:
        """Parse `delta`, and return the events of its visible part."""
        self._num_tokens += len(delta.token_ids)
        found = self._message.feed(delta)
        if (reason := delta.finish_reason) is not None:
            if reason == "stop" and self._message.ends_in_call:
                self._stop["stop_reason"] = "tool_use"
            elif reason == "stop" and isinstance(delta.stop_reason, str):
                self._stop = {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
            else:
                self._stop["stop_reason"] = _REASONS.get(reason, "end_turn")
        return found

    def _fields(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.style.model,
            "content": content,
            **self._stop,
            "stop_details": None,
            "container": None,
            "usage": {**self._usage(), "cache_creation": None, "service_tier": "standard"},
        }

    def _usage(self) -> dict[str, Any]:
        """The usage; `input_tokens` are those that were not found in the prefix cache."""
        cached = self._call.num_cached_tokens
        return {
            "input_tokens": self._call.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"thinking_tokens": self._message.num_reasoning},
            "server_tool_use": None,
        }


class _Blocks:
    """The events of content blocks, one of which is open at a time."""

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._index = -1
        self._kind: str | None = None

    def text(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        """Write more text, in the open block if that is of the same kind."""
        fields = {"text": "", "citations": None} if kind == "text" else {"thinking": "", "signature": ""}
        begun = b"" if self._kind == kind else self._open(kind, fields)
        return begun + self._delta(f"{kind}_delta", **{kind: text})

    def begin_call(self, call_id: str, name: str) -> bytes:
        return self._open("tool_use", {"id": call_id, "name": name, "input": {}})

    def arguments(self, text: str) -> bytes:
        """Write more of the arguments of the open call."""
        return self._delta("input_json_delta", partial_json=text) if text else b""

    def close(self) -> bytes:
        """End the open block, if there is one."""
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        signed = self._delta("signature_delta", signature=self._signature) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._index)

    def _open(self, kind: str, fields: dict[str, Any]) -> bytes:
        """End the open block, if there is one, and open another."""
        before = self.close()
        self._kind = kind
        self._index += 1
        return before + _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"
