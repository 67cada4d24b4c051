"""Structured output and tools over HTTP, as OpenAI's package sees them.

The demo model knows neither JSON nor tools, so only the grammar gives its answers the right form. Its template is
replaced by one with the literals of hermes, like Qwen's.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.http_server import ANIMAL, Server, serving

TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}assistant:"""
MESSAGES: Any = [{"role": "user", "content": "Who is in the cave?"}]


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": "it does", "parameters": ANIMAL, **more}}


def shaped(**schema: Any) -> Any:
    """The response_format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema or ANIMAL}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--served-model-name", "demo", template=TEMPLATE) as server:
        yield server


def asked(api: OpenAI, **fields: Any) -> Any:
    settings = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "temperature": 1.0, "seed": 5}
    return api.chat.completions.create(**{**settings, **fields})


def test_settings_in_force_are_reported(server: Server, http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]["vllm_lite"]
    assert (card["chat_template"], card["tool_call_format"], card["reasoning_format"]) == (
        "chat.jinja",
        "hermes",
        None,
    )
    assert "tool calls: hermes" in server.output


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema(api: OpenAI, seed: int) -> None:
    answer = asked(api, response_format=shaped(), seed=seed, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), ANIMAL)


def test_completions_and_token_ids_have_forms_too(api: OpenAI, http: httpx.Client) -> None:
    more = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}
    text = api.completions.create(model="demo", prompt="Once", max_tokens=50, extra_body=more).choices[0].text
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 50, "guided_choice": ["bear", "a fox"]}}
    ids = http.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"]
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.startswith(("bear", "a fox"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "finish", "names"),
    [
        ("required", "tool_calls", {"look", "ask"}),
        ({"type": "function", "function": {"name": "ask"}}, "stop", {"ask"}),
    ],
)
def test_calls_that_are_demanded_are_made(api: OpenAI, choice: Any, finish: str, names: set[str], stream: bool) -> None:
    fields = {"tools": [tool("look"), tool("ask")], "tool_choice": choice, "parallel_tool_calls": False}
    if not stream:
        answer = asked(api, **fields).choices[0]
        assert answer.message.content is None
        calls = [(call.id, call.function.name, call.function.arguments) for call in answer.message.tool_calls]
        reason = answer.finish_reason
    else:
        found: list[list[str]] = []
        reason = None
        for chunk in asked(api, stream=True, **fields):
            for delta in chunk.choices[0].delta.tool_calls or ():
                if delta.id is not None:
                    found.append([delta.id, delta.function.name, ""])
                found[delta.index][2] += delta.function.arguments
            reason = chunk.choices[0].finish_reason or reason
        calls = [(call_id, name, arguments) for call_id, name, arguments in found]
    assert reason == finish
    assert len(calls) == 1
    call_id, name, arguments = calls[0]
    assert call_id.startswith("call_")
    assert name in names
    jsonschema.validate(json.loads(arguments), ANIMAL)


def test_an_agent_continues_behind_a_call(api: OpenAI) -> None:
    first = asked(api, tools=[tool("look")], tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a bear"}
    answer = asked(api, messages=[*MESSAGES, first, result], tools=[tool("look", strict=True)], max_tokens=5)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.prompt_tokens > asked(api, max_tokens=1).usage.prompt_tokens


def test_a_bad_schema_names_the_place(api: OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        asked(api, response_format=shaped(**bad))
    assert caught.value.param == "response_format"
    assert "/properties/a" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"use_beam_search": True, "guided_choice": ["bear", "fox"]},
            "use_beam_search .* takes no .*structured_outputs",
        ),
        ({"use_beam_search": True, "thinking_token_budget": 3}, "use_beam_search .* takes no .*thinking_token_budget"),
        (
            {"guided_choice": ["a bear", "a fox"], "logit_bias": {"0": -100}, "bad_words": ["bear", "fox"]},
            "grammar allows no token",
        ),
    ],
)
def test_contradictory_constraints_are_the_requests_error(http: httpx.Client, fields: Any, says: str) -> None:
    """Also if the contradiction shows only after some tokens."""
    answer = http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 50, "temperature": 0, **fields}
    )
    assert answer.status_code == 400
    assert re.search(says, answer.json()["error"]["message"])


def test_a_stream_of_calls_is_resumed(http: httpx.Client) -> None:
    """No event is repeated or missing, whichever was the last one received."""
    body = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 200,
        "seed": 5,
        "request_id": "calls",
        "tools": [tool("look")],
        "tool_choice": "required",
        "stream": True,
        "resumable": True,
    }
    events = _events(http.post("/v1/chat/completions", json=body).text)
    place = len(events) // 2
    path, headers = "/v1/requests/chatcmpl-calls/stream", {"Last-Event-ID": events[place][0]}
    rest = _events(http.get(path, headers=headers).text)
    assert _arguments(events[: place + 1]) + _arguments(rest) == _arguments(events)
    assert rest[-1] == events[-1]


def _events(text: str) -> list[tuple[str, str]]:
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.split("\n\n")[:-1]]
    return [(block["id"], block["data"]) for block in blocks]


def _arguments(events: list[tuple[str, str]]) -> str:
    deltas = [json.loads(data)["choices"][0]["delta"] for _, data in events if data != "[DONE]"]
    return "".join(
        (call["function"].get("name") or "") + call["function"]["arguments"]
        for delta in deltas
        for call in delta.get("tool_calls", ())
    )


def test_a_tool_with_an_odd_schema_is_called_and_named_in_a_warning(api: OpenAI) -> None:
    """Agents' tools have such schemas; a single one used to make every required call a 400."""
    odd: dict[str, Any] = {
        "type": "object",
        "properties": {
            "host": {"type": "string", "pattern": r"^(\w)\1(?!-)"},
            "size": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            "ratio": {"type": "number", "minimum": 1e-9, "maximum": 1e308},
            "more": {"$ref": "https://a.invalid/s.json"},
            "kind": {"type": "any"},
            "none": {"type": "object", "required": None},
        },
        "required": [],
    }
    tools: list[Any] = [
        {"type": "function", "function": {"name": "odd", "parameters": odd}},
        {"type": "function", "function": {"name": "good", "parameters": {"type": "object", "properties": {}}}},
    ]
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "tools": tools}
    fields |= {"temperature": 1.0, "seed": 5, "parallel_tool_calls": False}
    answer = api.chat.completions.with_raw_response.create(**fields, tool_choice="required")
    parsed: Any = answer.parse()
    (call,) = parsed.choices[0].message.tool_calls
    assert call.function.name in ("odd", "good")
    wanted = ("kind: 'type'", "host: 'pattern'", "more: '$ref'")
    named = ", ".join(f"tools odd #/properties/{each}" for each in wanted)
    assert f'299 vllm-lite "not held: {named}"' in answer.headers["warning"]
    assert "not held" not in api.chat.completions.with_raw_response.create(**fields).headers.get("warning", "")
    tools[0]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"tool 'odd': the JSON schema at #/properties/kind: type is"):
        api.chat.completions.create(**fields)
