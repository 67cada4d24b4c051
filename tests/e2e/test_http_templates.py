"""Chats in every dialect through the chat template: a developer's message is in the prompt, a template that writes
lists of parts gets them, and the Warning header names messages that it leaves out."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.deadlines import scaled
from tests.http_server import Server, serving

TEMPLATE = """{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}{% continue %}{% endif %}
{%- if message.role in ['system', 'user', 'assistant', 'tool'] %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endif %}{% endfor %}"""
USER = {"role": "user", "content": "Who is there?"}
FUNCTION = {"role": "function", "name": "look", "content": "A fox."}
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
GONE = "messages[1] is not in the prompt: the model's chat template leaves it out"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--served-model-name", "demo", template=TEMPLATE) as server:
        yield server


def posted(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    answer = http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    return answer


def warned(answer: httpx.Response) -> str:
    return str(answer.headers.get("warning", ""))


def prompt_of(http: httpx.Client, path: str, **body: Any) -> str:
    """The text that a /render route tokenizes."""
    ids = posted(http, path, **body).json()["token_ids"]
    return str(posted(http, "/detokenize", tokens=ids).json()["prompt"])


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER, FUNCTION, USER], "max_tokens": 1}, GONE),
    ("/v1/chat/completions", {"messages": [USER, FUNCTION, USER], "max_tokens": 1, "stream": True}, GONE),
    ("/v1/chat/completions/batch", {"messages": [[USER], [USER, FUNCTION]], "max_tokens": 1}, "messages[1][1] is not"),
    ("/v1/chat/completions/render", {"messages": [USER, FUNCTION], "max_tokens": 1}, GONE),
    ("/invocations", {"messages": [USER, FUNCTION], "max_tokens": 1}, GONE),
    ("/tokenize", {"messages": [USER, FUNCTION]}, GONE),
    ("/v1/responses", {"input": [USER, SYSTEM, USER], "max_output_tokens": 1}, GONE),
    ("/v1/responses", {"input": [USER, SYSTEM, USER], "max_output_tokens": 1, "stream": True}, GONE),
    ("/v1/responses/input_tokens", {"input": [USER, SYSTEM, USER]}, GONE),
    ("/v1/messages", {"system": "Hi", "messages": [USER, SYSTEM, USER], "max_tokens": 1}, GONE),
    ("/v1/messages", {"system": "Hi", "messages": [USER, SYSTEM, USER], "max_tokens": 1, "stream": True}, GONE),
    ("/v1/messages/count_tokens", {"system": "Hi", "messages": [USER, SYSTEM, USER]}, GONE),
    ("/api/chat", {"messages": [USER, SYSTEM, USER], "options": {"num_predict": 1}}, GONE),
]


@pytest.mark.parametrize(
    ("path", "body", "text"), BODIES, ids=[f"{path} {body.get('stream')}" for path, body, _ in BODIES]
)
def test_messages_missing_in_the_prompt_are_named(
    http: httpx.Client, path: str, body: dict[str, Any], text: str
) -> None:
    assert f'299 vllm-lite "{text}' in warned(posted(http, path, **body))
    kept = {name: _without(value) if name in ("messages", "input") else value for name, value in body.items()}
    assert warned(posted(http, path, **kept)) == ""


def _without(messages: list[Any]) -> list[Any]:
    """The messages that are in the prompt."""
    if isinstance(messages[0], list):
        return [_without(each) for each in messages]
    return [each for each in messages if each not in (FUNCTION, SYSTEM)]


def test_messages_that_are_cut_count_as_well(http: httpx.Client) -> None:
    header = {"role": "system", "content": "x-anthropic-billing-header: cc_version=2.1;"}
    answer = posted(http, "/v1/chat/completions", messages=[header, USER, FUNCTION], max_tokens=1)
    assert warned(answer).startswith('299 vllm-lite "messages[2] is not in the prompt')


def test_the_warning_is_added_to_others(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields: dict[str, Any] = {"messages": [USER, FUNCTION], "tools": [tool], "nonsense": 1, "max_tokens": 1}
    text = warned(posted(http, "/v1/chat/completions", **fields))
    assert [part in text for part in ("ignored: nonsense", GONE, "tools: not shown to the model")] == [True] * 3
    assert text.count("299 vllm-lite") == 3
    text = warned(posted(http, "/api/chat", messages=[USER, FUNCTION], options={"num_predict": 1, "nonsense": 1}))
    assert [part in text for part in ("ignored: options.nonsense", GONE)] == [True] * 2


def test_many_warnings_fit_into_a_header(http: httpx.Client) -> None:
    text = warned(posted(http, "/v1/chat/completions/batch", messages=[[USER, FUNCTION]] * 64, max_tokens=1))
    assert text.startswith('299 vllm-lite "messages[0][1] is not in the prompt')
    assert len(text) < 4096


def test_a_developer_is_in_the_prompt(http: httpx.Client) -> None:
    developer = {"role": "developer", "content": "Use rhymes."}
    said = [developer, USER]
    assert prompt_of(http, "/v1/chat/completions/render", messages=said) == "<system>Use rhymes.<user>Who is there?"
    text = prompt_of(http, "/v1/chat/completions/render", messages=[SYSTEM, developer, USER])
    assert text == "<system>Be brief.\n\nUse rhymes.<user>Who is there?"
    text = prompt_of(http, "/v1/responses/render", instructions="Be brief.", input=said)
    assert text == "<system>Be brief.\n\nUse rhymes.<user>Who is there?"
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=scaled(60)) as api:
        messages: Any = [USER, {"role": "assistant", "content": "A fox."}, developer, USER]
        raw = api.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=1)
        assert raw.headers.get("warning") is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": PARTS}]}),
        ("/v1/messages/render", {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 1}),
    ],
)
def test_parts_come_to_the_template_as_a_list(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert prompt_of(http, path, **body) == "<user>[one][two]"


def test_parts_of_a_response_come_to_the_template_as_a_list(http: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": part["text"]} for part in PARTS]
    item = {"type": "message", "role": "user", "content": parts}
    assert prompt_of(http, "/v1/responses/render", input=[item]) == "<user>[one][two]"
