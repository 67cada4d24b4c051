"""The answers of /api/chat and /api/generate: one object, or lines of objects."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.arguments import arguments_of
from vllm_lite.client.text.response.events import CallDelta, TextDelta
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.ollama import errors
from vllm_lite.server.openai import logprobs
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsing import MessageParser

_encode = msgspec.json.encode
LINES = "application/x-ndjson"
"""Media type of a stream."""
NS = 1_000_000_000
Kind = Literal["chat", "generate"]


def created_at() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def said(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    """Wrap the model's text and other fields for /api/chat or /api/generate."""
    text = fields.pop("content", "")
    if kind == "generate":
        return {"response": text, **fields}
    return {"message": {"role": "assistant", "content": text, **fields}}


class OllamaWriter:
    def __init__(self, call: Call, message: MessageParser, spelling: Spelling, kind: Kind) -> None:
        self._call = call
        self._message = message
        self._spelling = spelling
        self._kind: Kind = kind
        self._num_logprobs = call.streams[0].params.logprobs
        self._num_tokens = 0
        self._reason = "stop"
        self._call_begun: tuple[CallDelta, str] | None = None
        """The tool call whose arguments are still arriving, and its id."""
        self._arguments: list[str] = []

    @property
    def ping(self) -> bytes:
        """A line with empty text: clients parse every line as JSON."""
        return self._line(said(self._kind, {}))

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes:  # noqa: ARG002
        """Write a line for each run of one field; the first has the logprobs."""
        scores, lines = self._scores(delta), list[dict[str, Any]]()
        for name, value in self._feed(delta):
            if lines and name in lines[-1]:
                lines[-1][name] += value
            else:
                lines.append({name: value})
        if scores and not lines:
            lines.append({})
        return b"".join(
            self._line({**said(self._kind, fields), **({} if place else scores)}) for place, fields in enumerate(lines)
        )

    def closing(self) -> list[bytes]:
        return [self._line({**said(self._kind, {}), **self._end()}, done=True)]

    def failure(self, error: ApiError) -> bytes:
        return errors.body(error) + b"\n"

    def whole(self) -> bytes:
        fields, scores = dict[str, Any](), dict[str, Any]()
        for _, delta in self._call.reading.deltas():
            for name, value in self._feed(delta):
                fields[name] = fields[name] + value if name in fields else value
            scores |= self._scores(delta)
        return self._line({**said(self._kind, fields), **scores, **self._end()}, done=True)[:-1]

    def _line(self, fields: dict[str, Any], *, done: bool = False) -> bytes:
        return _encode({"model": self._call.style.model, "created_at": created_at(), **fields, "done": done}) + b"\n"

    def _feed(self, delta: CompletionOutput) -> Iterator[tuple[str, Any]]:
        """Yield pairs (field, new value), in order; tool calls only when they are complete."""
        self._num_tokens += len(delta.token_ids)
        for event in self._message.feed(delta):
            if isinstance(event, CallDelta):
                if event.name is not None:
                    yield from self._whole_call()
                    self._call_begun = event, self._message.id_of(event)
                self._arguments.append(event.arguments)
                continue
            yield from self._whole_call()
            yield "content" if isinstance(event, TextDelta) else "thinking", event.text
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            yield from self._whole_call()

    def _whole_call(self) -> Iterator[tuple[str, Any]]:
        """Yield the tool call that has ended, if there is one, unless its arguments are truncated."""
        begun, given = self._call_begun, arguments_of("".join(self._arguments))
        self._call_begun, self._arguments = None, []
        if begun is not None and given is not None:
            call, call_id = begun
            function = {"index": call.index, "name": call.name, "arguments": given}
            yield "tool_calls", [{"id": call_id, "function": function}]

    def _scores(self, delta: CompletionOutput) -> dict[str, Any]:
        if self._num_logprobs is None or not delta.logprobs:
            return {}
        return {"logprobs": logprobs.of_chat(delta.logprobs, self._num_logprobs, self._spelling)["content"]}

    def _end(self) -> dict[str, Any]:
        """The counters, with durations in nanoseconds; prompt evaluation ends with the first token."""
        times = self._call.streams[0].metrics
        first_s = times.first_token_time or times.arrival_time
        last_s = times.finished_time or times.last_token_time or first_s
        return {
            "done_reason": self._reason,
            "total_duration": _ns(last_s - times.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": self._call.num_prompt_tokens,
            "prompt_eval_duration": _ns(first_s - times.arrival_time),
            "eval_count": self._num_tokens,
            "eval_duration": _ns(last_s - first_s),
        }


def _ns(seconds: float) -> int:
    """Convert to nanoseconds, at least 1: clients divide by it."""
    return max(1, round(seconds * NS))
