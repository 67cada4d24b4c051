"""Anthropic's API on a real server: checks requests and answers, field by field and event by event.

The demo model knows neither tools nor thinking, so only the grammar gives its answers the right form.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.deadlines import scaled
from tests.http_server import ANIMAL, Server, serving

KEY = "sk-messages"
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
TEMPLATE = """{{- bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>
{%- if message.reasoning %}<think>{{ message.reasoning }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}{% if not enable_thinking %}<think></think>{% endif %}<|assistant|>
{%- if enable_thinking %}<think>{% endif %}{% endif %}"""
TOOLS: list[Any] = [{"name": name, "description": "it does", "input_schema": ANIMAL} for name in ("look", "ask")]
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a cat."}]
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 12, "messages": MESSAGES, "temperature": 0, "ignore_eos": True}
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--max-request-bytes", "1000000"]
    with serving("--served-model-name", "demo", "--api-key", KEY, *flags, template=TEMPLATE) as server:
        yield server


def post(http: httpx.Client, status: int = 200, path: str = PATH, **fields: Any) -> Any:
    answer = http.post(path, json={**BODY, **fields})
    assert answer.status_code == status, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.json()


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post(PATH, json={**BODY, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make up. They have to be in order."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        delta, block = dict(event["delta"]), blocks[-1]
        kind = delta.pop("type")
        (name, value), *more = delta.items()
        assert not more
        assert kind == {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
        block["json" if name == "partial_json" else name] += value
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    usage = {**message["usage"], **events[-2]["usage"]}
    return {**message, **events[-2]["delta"], "content": blocks, "usage": usage}


def told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the fields that differ between two equal answers."""
    message = {**message, "id": "", "usage": {**message["usage"], "input_tokens": 0, "cache_read_input_tokens": 0}}
    for block in message["content"]:
        block.update({name: "" for name in ("signature", "id") if name in block})
    return message


def test_a_message_is_answered_and_streamed_alike(http: httpx.Client) -> None:
    whole = post(http)
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "demo")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["usage"]["output_tokens"] == 12
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert told(put_together(streamed(http))) == told(whole)
    chat = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    as_chat = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert whole["content"][0]["text"] == as_chat


def test_usage_counts_cached_tokens_apart(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "A bear walks through the wood. " * 20}]
    first, second = post(http, messages=long)["usage"], post(http, messages=long)["usage"]
    counted = post(http, path=PATH + "/count_tokens", messages=long)
    assert first["input_tokens"] + first["cache_read_input_tokens"] == counted["input_tokens"]
    assert second["input_tokens"] + second["cache_read_input_tokens"] == counted["input_tokens"]
    assert second["cache_read_input_tokens"] > 0


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    text = post(http)["content"][0]["text"]
    stop = text.split()[2]
    whole = post(http, stop_sequences=["never", stop])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text[: text.index(stop)].rstrip() or stop not in whole["content"][0]["text"]
    assert told(put_together(streamed(http, stop_sequences=["never", stop]))) == told(whole)


def count(http: httpx.Client, **fields: Any) -> int:
    return int(post(http, path=PATH + "/count_tokens", **fields)["input_tokens"])


def test_content_is_a_text_or_blocks(http: httpx.Client) -> None:
    text = "Tell me a story about a cat."
    plain = count(http, messages=MESSAGES)
    cached = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    assert count(http, messages=[{"role": "user", "content": [cached]}]) == plain
    system = count(http, system="Be brief.")
    unsteady = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abcde"}
    assert system > plain
    assert count(http, system=[{"type": "text", "text": "Be brief."}]) == system
    assert count(http, system=[unsteady, {"type": "text", "text": "Be brief."}]) == system


def test_messages_of_one_speaker_in_a_row_are_one(http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    seen = {"type": "tool_result", "tool_use_id": "c1", "content": "seen"}
    apart = [
        {"role": "user", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "assistant", "content": "Both."},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [seen]},
        {"role": "user", "content": "And now?"},
    ]
    as_chat = [
        {"role": "user", "content": "A cat.\nA dog."},
        {
            "role": "assistant",
            "content": "Both.\nI look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "user", "content": "And now?"},
    ]
    assert count(http, messages=apart) == http.post("/tokenize", json={"messages": as_chat}).json()["count"]


def test_an_answer_continues_from_a_last_message_of_the_assistant(http: httpx.Client) -> None:
    text = post(http)["content"][0]["text"]
    first = " ".join(text.split(" ")[:4])
    said = [*MESSAGES, {"role": "assistant", "content": first}]
    chat = {"messages": said, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "continue_final_message": True}
    as_chat = http.post("/v1/chat/completions", json=chat).json()
    whole = post(http, messages=said)
    assert whole["content"][0]["text"] == as_chat["choices"][0]["message"]["content"] != text
    assert count(http, messages=said) == as_chat["usage"]["prompt_tokens"]
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    error = post(http, 400, messages=[*MESSAGES, {"role": "assistant", "content": [call]}])
    assert "tool_result" in error["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, {"look", "ask"}),
        ({"type": "tool", "name": "ask"}, {"ask"}),
    ],
)
def test_tools_that_have_to_be_used_are(http: httpx.Client, choice: Any, names: set[str]) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "ignore_eos": False, "seed": 5}
    for message in (post(http, **fields), put_together(streamed(http, **fields))):
        (block,) = message["content"]
        assert (block["type"], message["stop_reason"]) == ("tool_use", "tool_use")
        assert block["name"] in names
        jsonschema.validate(block["input"], ANIMAL)


def test_calls_and_their_results_are_shown_to_the_model(http: httpx.Client) -> None:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": "look", "input": {"animal": "bear", "age": i}} for i in (1, 2)]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "seen"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "gone"}], "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    thought = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    said = [*MESSAGES, {"role": "assistant", "content": [*thought, {"type": "text", "text": "I look."}, *calls]}]
    body: dict[str, Any] = {"messages": [*said, {"role": "user", "content": results}], "tools": TOOLS, "max_tokens": 5}
    expected = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "hm",
            "tool_calls": [
                {"id": call["id"], "type": "function", "function": {"name": "look", "arguments": call["input"]}}
                for call in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: gone"},
        {"role": "user", "content": "And now?"},
    ]
    functions = [
        {"type": "function", "function": {"name": tool["name"], "description": "it does", "parameters": ANIMAL}}
        for tool in TOOLS
    ]
    same = http.post("/tokenize", json={"messages": expected, "tools": functions}).json()["count"]
    assert count(http, **body) == same
    assert post(http, **body)["usage"]["output_tokens"] == 5
    assert count(http, **body, tool_choice={"type": "none"}) < same, "no tool is shown that may not be used"


def test_thinking_is_a_block_of_its_own(http: httpx.Client) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 40,
        "ignore_eos": False,
        "output_config": {"format": {"type": "json_schema", "schema": ANIMAL}},
    }
    thinks: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 6}, **fields}
    whole = post(http, **thinks)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["content"][0]["signature"]
    jsonschema.validate(json.loads(whole["content"][1]["text"]), ANIMAL)
    assert 6 <= whole["usage"]["output_tokens_details"]["thinking_tokens"] <= 12, "with what ends it"
    events = streamed(http, **thinks)
    assert told(put_together(events)) == told(whole)
    assert [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"].count("signature_delta") == 1
    for quiet in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 6, "display": "omitted"}):
        assert [block["type"] for block in post(http, thinking=quiet, **fields)["content"]] == ["text"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "'tool_use'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "look"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "fly"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"mcp_servers": [{"url": "http://localhost"}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system[0]"),
    ],
)
def test_bad_bodies_are_named(http: httpx.Client, fields: dict[str, Any], says: str) -> None:
    error = post(http, 400, **fields)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert says in error["error"]["message"]
    assert error["request_id"]


def test_every_failure_has_the_form_of_this_api(server: Server, http: httpx.Client) -> None:
    odd: list[tuple[httpx.Response, int, str]] = [
        (httpx.post(server.url + PATH, json=BODY, timeout=scaled(30)), 401, "authentication_error"),
        (http.post(PATH, json={**BODY, "model": "other"}), 404, "not_found_error"),
        (http.post(PATH + "/batches", json=BODY), 404, "not_found_error"),
        (http.get(PATH), 405, "invalid_request_error"),
        (http.post(PATH, content=b"{"), 415, "invalid_request_error"),
        (
            http.post("/v1//messages/", content=b"{", headers={"Content-Type": "application/json"}),
            400,
            "invalid_request_error",
        ),
        (
            http.post("/messages", content=b"[" * 5000, headers={"Content-Type": "application/json"}),
            400,
            "invalid_request_error",
        ),
        (http.post(PATH, json={**BODY, "system": "x" * 1_000_000}), 413, "request_too_large"),
        (http.post(PATH, json={**BODY, "deadline_ms": 1, "max_tokens": 2000}), 408, "timeout_error"),
    ]
    for answer, status, kind in odd:
        assert answer.status_code == status, answer.text
        error = answer.json()
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert error["request_id"] == answer.headers["request-id"]
    assert "param" in http.get("/v1/nothing").json()["error"], "other paths have OpenAI's form"


def test_metrics_and_descriptions(http: httpx.Client) -> None:
    post(http)
    count = [line for line in http.get("/metrics").text.splitlines() if f'"{PATH}"' in line and '"200"' in line]
    assert count
    paths = http.get("/openapi.json").json()["paths"]
    assert {PATH, PATH + "/count_tokens", "/api/chat", "/api/generate"} <= set(paths)
    props, slots = http.get("/props").json(), http.get("/slots").json()
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"] > 0
    assert (props["model_alias"], props["total_slots"], slots[0]["is_processing"]) == ("demo", len(slots), False)


# ---- the official client


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=scaled(60)) as api:
        yield api


def test_the_official_client(api: Any) -> None:
    fields = {"model": "demo", "max_tokens": 12, "messages": MESSAGES, "system": "Be brief."}
    message = api.messages.create(**fields)
    assert message.content[0].type == "text"
    assert message._request_id
    with api.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens <= 12
    counted = api.messages.count_tokens(model="demo", messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_loop_of_tools_with_the_official_client(api: Any) -> None:
    messages: list[Any] = list(MESSAGES)
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "none"}):
        with api.messages.stream(
            model="demo", max_tokens=200, messages=messages, tools=TOOLS, tool_choice=choice
        ) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            assert not uses
            break
        (use,) = uses
        jsonschema.validate(use.input, ANIMAL)
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "a bear"}]}
        )
    assert message.stop_reason in ("end_turn", "max_tokens")


def test_errors_of_the_official_client(server: Server, api: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    fields = {"model": "demo", "max_tokens": 12, "messages": MESSAGES}
    with pytest.raises(anthropic.NotFoundError, match="other"):
        api.messages.create(**{**fields, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        api.messages.create(**{**fields, "max_tokens": 0})
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        stranger.messages.create(**fields)
    assert caught.value.body["error"]["type"] == "authentication_error"
