"""The answers of /api/chat and /api/generate: one object, or lines of objects."""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.ollama import errors
from vllm_lite.server.openai import logprobs
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsing import MessageParser, PlainMessage

_encode = msgspec.json.encode
NS = 1_000_000_000
Kind = Literal["chat", "generate"]


def created_at() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def said(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    """What the model has said, in the form of a route."""
    text = fields.pop("content", "")
    if kind == "generate":
        return {"response": text, **fields}
    return {"message": {"role": "assistant", "content": text, **fields}}


class OllamaWriter:
    """Writes the answer of one call, which has one choice."""

    def __init__(self, call: Call, message: MessageParser | PlainMessage, spelling: Spelling, kind: Kind) -> None:
        self._call = call
        self._message = message
        self._spelling = spelling
        self._kind: Kind = kind
        self._num_logprobs = call.streams[0].params.logprobs
        self._num_tokens = 0
        self._reason = "stop"
        self._calls: list[dict[str, Any]] = []
        """Calls whose arguments may not be whole yet."""

    @property
    def ping(self) -> bytes:
        """A line that says nothing: clients read every one as JSON."""
        return self._line(said(self._kind, {}))

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes:  # noqa: ARG002
        fields = self._feed(delta)
        scores = self._scores(delta)
        return self._line({**said(self._kind, fields), **scores}) if fields or scores else b""

    def closing(self) -> list[bytes]:
        return [self._line({**said(self._kind, {}), **self._end()}, done=True)]

    def failure(self, error: ApiError) -> bytes:
        return errors.body(error) + b"\n"

    def whole(self) -> bytes:
        fields, scores = dict[str, Any](), dict[str, Any]()
        for _, delta in self._call.reading.deltas():
            fields |= self._feed(delta)
            scores |= self._scores(delta)
        return self._line({**said(self._kind, fields), **scores, **self._end()}, done=True)[:-1]

    def _line(self, fields: dict[str, Any], *, done: bool = False) -> bytes:
        return _encode({"model": self._call.style.model, "created_at": created_at(), **fields, "done": done}) + b"\n"

    def _feed(self, delta: CompletionOutput) -> dict[str, Any]:
        """What is visible now; calls when they are whole."""
        self._num_tokens += len(delta.token_ids)
        found = self._message.feed(delta)
        fields = {name: found[key] for name, key in (("content", "content"), ("thinking", "reasoning")) if key in found}
        calls: list[dict[str, Any]] = []
        for call in found.get("tool_calls", ()):
            if "id" in call:
                calls += self._whole_calls()
                self._calls = [{"id": call["id"], "index": call["index"], "name": call["function"]["name"], "text": ""}]
            self._calls[-1]["text"] += call["function"]["arguments"]
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            calls += self._whole_calls()
        return {**fields, "tool_calls": calls} if calls else fields

    def _whole_calls(self) -> list[dict[str, Any]]:
        """The call that has ended; none that was cut off in its arguments."""
        calls, self._calls = self._calls, []
        made = []
        for call in calls:
            try:
                given = msgspec.json.decode(call["text"] or "{}", type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError):
                continue
            function = {"index": call["index"], "name": call["name"], "arguments": given}
            made.append({"id": call["id"], "function": function})
        return made

    def _scores(self, delta: CompletionOutput) -> dict[str, Any]:
        if self._num_logprobs is None or not delta.logprobs:
            return {}
        return {"logprobs": logprobs.of_chat(delta.logprobs, self._num_logprobs, self._spelling)["content"]}

    def _end(self) -> dict[str, Any]:
        """The counters, with durations in nanoseconds; a prompt is evaluated until its first token is there."""
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
    """At least 1: clients divide by it."""
    return max(1, round(seconds * NS))
