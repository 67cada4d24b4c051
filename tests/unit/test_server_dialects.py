"""Content, reasoning and calls written by other dialects; bodies as chats; errors by their path."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_lite.client.outputs import CompletionOutput, RequestMetrics
from vllm_lite.client.text.response.events import CallDelta, Event, ReasoningDelta, TextDelta
from vllm_lite.server.http.dialects import REQUEST_ID, Dialects
from vllm_lite.server.messages import errors as messages_errors
from vllm_lite.server.messages.answers import MessageWriter
from vllm_lite.server.messages.bodies import MAX_BLOCKS, MessagesBody
from vllm_lite.server.messages.chats import chat_of
from vllm_lite.server.ollama import errors as ollama_errors
from vllm_lite.server.ollama.answers import OllamaWriter
from vllm_lite.server.ollama.bodies import OllamaGenerateBody
from vllm_lite.server.ollama.chats import completion_of
from vllm_lite.server.openai.errors import ApiError, shown
from vllm_lite.server.openai.logprobs import Spelling

EVENTS: list[list[Event]] = [
    [ReasoningDelta("I ")],
    [ReasoningDelta("look.")],
    [TextDelta("Let ")],
    [TextDelta("me.")],
    [CallDelta(0, "look", "")],
    [CallDelta(0, None, '{"x": 1,')],
    [CallDelta(0, None, ' "y": {}}'), CallDelta(1, "ask", "{}")],
    [TextDelta("Done.")],
]
"""Visible parts of an answer, delta by delta."""
WHOLE: list[Event] = [
    ReasoningDelta("I look."),
    TextDelta("Let me."),
    CallDelta(0, "look", '{"x": 1, "y": {}}'),
    TextDelta("And"),
    CallDelta(1, "ask", '{"x": 1, "cut'),
]


class FakeMessage:
    """Shows one of its lists of events for each delta."""

    num_reasoning = 2
    ends_in_call = True

    def __init__(self, events: Sequence[list[Event]]) -> None:
        self._events = iter(events)

    def feed(self, _: CompletionOutput) -> list[Event]:
        return next(self._events)

    def id_of(self, call: CallDelta) -> str:
        return "ab"[call.index]


def delta(reason: Any = None, stop: Any = None) -> CompletionOutput:
    return CompletionOutput(0, "x", [1], finish_reason=reason, stop_reason=stop)


def fake_call(deltas: Sequence[CompletionOutput]) -> Any:
    params = SimpleNamespace(logprobs=None)
    stream = SimpleNamespace(params=params, metrics=RequestMetrics(1.0, 1.5, 3.5, 3.5))
    reading = SimpleNamespace(deltas=lambda: ((None, each) for each in deltas))
    style = SimpleNamespace(model="m")
    return SimpleNamespace(
        id="msg_1", style=style, streams=[stream], reading=reading, num_prompt_tokens=10, num_cached_tokens=8
    )


def message_writer(events: Sequence[list[Event]], deltas: Sequence[CompletionOutput] = ()) -> MessageWriter:
    return MessageWriter(fake_call(deltas), FakeMessage(events), "r")  # type: ignore[arg-type]


def ollama_writer(events: Sequence[list[Event]], deltas: Sequence[CompletionOutput] = ()) -> OllamaWriter:
    return OllamaWriter(fake_call(deltas), FakeMessage(events), Spelling(None), "chat")  # type: ignore[arg-type]


def deltas_of(fields: Sequence[Any]) -> list[CompletionOutput]:
    return [*[delta() for _ in fields[1:]], delta("stop")]


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split("\ndata: ")[1]) for block in data.decode().split("\n\n")[:-1]]


def test_blocks_follow_each_other_and_one_is_open() -> None:
    writer = message_writer(EVENTS)
    data = b"".join(writer.chunk(None, each) for each in deltas_of(EVENTS))  # type: ignore[arg-type]
    found = events(data + b"".join(writer.closing()))
    told = [
        (
            event["type"].removeprefix("content_block_"),
            event.get("index"),
            event.get("content_block", event.get("delta", {})).get("type"),
        )
        for event in found
    ]
    assert told == [
        ("start", 0, "thinking"),
        ("delta", 0, "thinking_delta"),
        ("delta", 0, "thinking_delta"),
        ("delta", 0, "signature_delta"),
        ("stop", 0, None),
        ("start", 1, "text"),
        ("delta", 1, "text_delta"),
        ("delta", 1, "text_delta"),
        ("stop", 1, None),
        ("start", 2, "tool_use"),
        ("delta", 2, "input_json_delta"),
        ("delta", 2, "input_json_delta"),
        ("stop", 2, None),
        ("start", 3, "tool_use"),
        ("delta", 3, "input_json_delta"),
        ("stop", 3, None),
        ("start", 4, "text"),
        ("delta", 4, "text_delta"),
        ("stop", 4, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["input_tokens"] == 2
    assert found[-2]["usage"]["cache_read_input_tokens"] == 8
    assert found[-2]["usage"]["output_tokens"] == len(EVENTS)
    assert message_writer([]).closing()[0] == b"", "an answer without content has no block"


def test_a_call_that_was_cut_off_is_no_block() -> None:
    body = json.loads(message_writer([WHOLE], [delta("length")]).whole())
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "text"]
    assert body["content"][2]["input"] == {"x": 1, "y": {}}
    assert body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("reason", "stop", "ends_in_call", "expected"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", 7, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", "END", True, ("tool_use", None)),
        ("length", None, True, ("max_tokens", None)),
        ("abort", None, False, ("pause_turn", None)),
    ],
)
def test_why_a_message_stops(reason: str, stop: Any, ends_in_call: bool, expected: tuple[str, str | None]) -> None:
    message = FakeMessage([[TextDelta("x")]])
    message.ends_in_call = ends_in_call
    writer = MessageWriter(fake_call([delta(reason, stop)]), message, "r")  # type: ignore[arg-type]
    body = json.loads(writer.whole())
    assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_errors_in_the_middle_of_a_stream() -> None:
    error = ApiError(503, "gone")
    assert events(message_writer([]).failure(error)) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}, "request_id": "r"}
    ]
    assert ollama_writer([]).failure(error) == b'{"error":"gone"}\n'


def test_calls_are_lines_when_they_are_whole() -> None:
    writer = ollama_writer(EVENTS)
    data = b"".join(writer.chunk(None, each) for each in deltas_of(EVENTS))  # type: ignore[arg-type]
    messages = [json.loads(line)["message"] for line in data.splitlines()]
    assert "".join(message.get("thinking", "") for message in messages) == "I look."
    assert [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message] == [
        {"index": 0, "name": "look", "arguments": {"x": 1, "y": {}}},
        {"index": 1, "name": "ask", "arguments": {}},
    ]
    end = json.loads(writer.closing()[0])
    assert (end["total_duration"], end["prompt_eval_duration"]) == (2_500_000_000, 500_000_000)
    assert (end["eval_duration"], end["eval_count"], end["done_reason"]) == (2_000_000_000, len(EVENTS), "stop")
    assert json.loads(writer.ping)["message"]["content"] == "", "clients read every line as JSON"


def test_a_whole_answer_has_the_calls_that_are_whole() -> None:
    body = json.loads(ollama_writer([WHOLE], [delta("length")]).whole())
    assert [call["function"]["name"] for call in body["message"]["tool_calls"]] == ["look"]
    assert (body["done"], body["done_reason"]) == (True, "length")


def body_of(**fields: Any) -> MessagesBody:
    said = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **fields}
    return msgspec.json.decode(msgspec.json.encode(said), type=MessagesBody)


def test_max_tokens_may_be_beyond_the_context() -> None:
    assert chat_of(body_of(max_tokens=10**30), 2048).max_tokens == 2048
    assert completion_of(OllamaGenerateBody(prompt="x"), 2048).max_tokens == 2048
    assert completion_of(OllamaGenerateBody(prompt="x", options={"num_predict": 7}), 2048).max_tokens == 7


def test_the_number_of_blocks_is_bounded() -> None:
    several = [{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_BLOCKS // 4)}] * 5
    with pytest.raises(ApiError, match="content blocks"):
        chat_of(body_of(messages=several), 2048)
    inner = [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}] * 9000}] * 2
    with pytest.raises(ApiError, match="18002 content blocks"):
        chat_of(body_of(messages=[{"role": "user", "content": inner}]), 2048)
    results = [{"type": "tool_result", "tool_use_id": "a"}] * 5000
    with pytest.raises(ApiError, match="tool results"):
        chat_of(body_of(messages=[{"role": "user", "content": results}]), 2048)
    uses = [{"type": "tool_use", "id": "a", "name": "b", "input": {}}] * 129
    with pytest.raises(ApiError, match="tool_use"):
        chat_of(body_of(messages=[{"role": "assistant", "content": uses}]), 2048)
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(ApiError, match="nested"):
        chat_of(body_of(messages=[{"role": "assistant", "content": [{**uses[0], "input": deep}]}]), 2048)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/messages", "anthropic"),
        ("//v1/messages/", "anthropic"),
        ("/messages/count_tokens", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/api/chat", "ollama"),
        ("/apis", "openai"),
        ("/", "openai"),
    ],
)
def test_the_path_decides_the_form_of_errors(path: str, form: str) -> None:
    forms: dict[str, Any] = dict.fromkeys(messages_errors.PATHS, messages_errors.response)
    forms |= dict.fromkeys(ollama_errors.PATHS, ollama_errors.response)
    error = ApiError(429, "full", headers={"Retry-After": "1"})
    response = Dialects(forms).response({"type": "http", "path": path, REQUEST_ID: "r"}, error)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    body = json.loads(bytes(response.body))
    expected = {
        "anthropic": {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}, "request_id": "r"},
        "ollama": {"error": "full"},
        "openai": {"error": {"message": "full", "type": "RateLimitError", "param": None, "code": 429}},
    }
    assert body == expected[form]


def test_texts_of_strangers_are_quoted_on_one_short_line() -> None:
    assert shown("/v1/é") == "/v1/é"
    assert shown("/\r\nX: y\x00") == r"/\r\nX: y\x00"
    assert shown("a" * 5000) == "a" * 200 + "..."
