"""Whole chats in the formats of gpt-oss and Gemma 4: from a template's literals to a call, and on with its result.

The demo model knows neither format, so a grammar makes the calls. The templates are short, with the literals, fields
and order of the models' own templates.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from tests.deadlines import scaled
from tests.http_server import ANIMAL, Server, serving

HARMONY = """{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- set said = message.thinking or message.content %}
{%- if said %}<|start|>assistant<|channel|>analysis<|message|>{{ said }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}
{%- raw %}<|channel|>commentary json<|message|>{% endraw %}{{ call.arguments | tojson }}<|call|>
{%- elif message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
GEMMA = """{%- for message in messages %}
{%- if message.role == 'assistant' %}<|turn>model
{% if message.reasoning and message.tool_calls %}<|channel>thought
{{ message.reasoning }}
<channel|>{% endif %}
{%- for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{
{%- for key, value in call.function.arguments | dictsort %}{{ key }}:
{%- if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value }}{% endif %}{{ '' if loop.last else ',' }}
{%- endfor %}}<tool_call|>{% endfor %}{{ message.content }}
{%- elif message.role == 'tool' %}<|tool_response>response:look{value:<|"|>{{ message.content }}<|"|>}<tool_response|>
{%- else %}<|turn>{{ message.role }}
{{ message.content }}<turn|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model
<|channel>thought
<channel|>{% endif %}"""
TEMPLATES = {"openai": HARMONY, "gemma4": GEMMA}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": ANIMAL}} for name in ("look", "ask")]
ASKED: Any = [{"role": "user", "content": "Who is in the cave?"}]
THOUGHT = "I must look."


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with serving("--served-model-name", "demo", template=TEMPLATES[request.param]) as server:
        yield request.param, server


@pytest.fixture(scope="module")
def api(server: tuple[str, Server]) -> Iterator[OpenAI]:
    with OpenAI(base_url=server[1].url + "/v1", api_key="none", max_retries=0, timeout=scaled(60)) as api:
        yield api


def chat(api: OpenAI, messages: Any = ASKED, **fields: Any) -> Any:
    settings = {"model": "demo", "max_tokens": 200, "temperature": 1.0, "seed": 5, "tools": TOOLS}
    return api.chat.completions.create(messages=messages, **{**settings, **fields})


def calls_of(stream: Any) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments
    return [(name, arguments) for name, arguments in calls]


def rendered(server: Server, messages: Any) -> str:
    """The prompt that the server makes of a chat."""
    with httpx.Client(base_url=server.url, timeout=scaled(60)) as http:
        tokens = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
        return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_a_call_its_result_and_the_next_answer(server: tuple[str, Server], api: OpenAI) -> None:
    name, running = server
    card = httpx.get(running.url + "/v1/models", timeout=scaled(60)).json()["data"][0]["vllm_lite"]
    assert (card["tool_call_format"], card["reasoning_format"]) == (name, name), "by the template's literals"
    first = chat(api, tool_choice="required").choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, ANIMAL)
    streamed = calls_of(chat(api, tool_choice="required", stream=True))
    assert streamed == [(call.function.name, call.function.arguments)]

    for more in ({}, {"reasoning": THOUGHT}):
        answered = {**first.message.model_dump(exclude_none=True), **more}
        talk = [*ASKED, answered, {"role": "tool", "tool_call_id": call.id, "content": "a bear"}]
        prompt = rendered(running, talk)
        assert (THOUGHT in prompt) == bool(more)
        assert prompt.index("Who is in") < prompt.index(f"{call.function.name}") < prompt.index("a bear")
        assert prompt.endswith(("<|start|>assistant", "<tool_response|>"))
        said = chat(api, talk, max_tokens=12).choices[0].message
        assert said.tool_calls is None, "the call of the turn before is not one of this turn"
        assert said.content
        assert calls_of(chat(api, talk, max_tokens=12, stream=True)) == []
        extra = {"thinking_token_budget": 4} if name == "gemma4" else {}
        again = calls_of(chat(api, talk, tool_choice="required", stream=True, extra_body=extra))
        assert len(again) == 1
        jsonschema.validate(json.loads(again[0][1]), ANIMAL)


def test_a_text_before_the_call_replaces_the_thought(server: tuple[str, Server]) -> None:
    """gpt-oss's template refuses both."""
    function = {"name": "look", "arguments": '{"animal": "fox", "age": 3}'}
    call = {"id": "call_1", "type": "function", "function": function}
    spoken = {"role": "assistant", "content": "Let me see.", "reasoning": THOUGHT, "tool_calls": [call]}
    prompt = rendered(server[1], [*ASKED, spoken, {"role": "tool", "tool_call_id": "call_1", "content": "a fox"}])
    assert "Let me see." in prompt
