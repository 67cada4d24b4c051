"""Whole turns of agents on a real server with scripted outputs: a call, its result, a text.

The requests have the fields that Codex and Claude Code send by default; tests/acceptance/try_agents.py runs the agents
themselves.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http_server import Server, serving
from tests.response_events import check_stream, checked, events_in
from tests.scripted_turns import make_scripted

PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+h\N{LATIN SMALL LETTER E WITH ACUTE}llo\n*** End Patch"
DONE = "The file hello.txt is there, and it says hello."
CHOICE = """
{%- set play = namespace(name='done') %}
{%- if messages[-1].role != 'tool' %}{% for tool in tools or [] %}{% if tool.function.name in [
'agents__spawn', 'apply_patch', 'local_shell', 'Bash'] %}{% set play.name = tool.function.name %}{% endif %}
{%- endfor %}{% endif %}{{ play.name }}"""
FUNCTION: Any = {"type": "object", "properties": {}, "additionalProperties": True}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": FUNCTION}],
}
SEARCH: Any = {"type": "web_search", "external_web_access": True}


def called(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nI need {name} for it.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


SCRIPTS = {
    "done": DONE,
    "agents__spawn": called("agents__spawn", task="write"),
    "apply_patch": called("apply_patch", input=PATCH),
    "local_shell": called("local_shell", command=["touch", "hello.txt"]),
    "Bash": called("Bash", command="touch hello.txt"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_scripted(tmp_path_factory.mktemp("scripted"), SCRIPTS, CHOICE)
    flags = ["--served-model-name", "scripted", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with serving(str(folder), *flags, "--log-level", "error") as server:
        yield server


# ---- Codex


def responded(http: httpx.Client, tools: list[Any], given: list[Any], *, stream: bool) -> tuple[dict[str, Any], str]:
    """The response, and the Warning of the answer."""
    body: dict[str, Any] = {
        "model": "scripted",
        "input": given,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "one",
        "stream": stream,
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found = check_stream(list(events_in(answer.text.splitlines()))) if stream else answer.json()
    checked(found)
    return found, answer.headers.get("warning", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tool", "output", "expected"),
    [
        (
            AGENTS,
            {"type": "function_call_output", "output": "started"},
            {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": '{"task": "write"}'},
        ),
        (
            {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
            {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "Success."}]},
            {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
        ),
        (
            {"type": "local_shell"},
            {"type": "local_shell_call_output", "output": "{}"},
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["touch", "hello.txt"], "env": {}}},
        ),
    ],
    ids=["namespace", "custom", "local_shell"],
)
def test_a_turn_of_codex(http: httpx.Client, tool: Any, output: Any, expected: Any, stream: bool) -> None:
    start = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Create hello.txt."}]},
    ]
    first, warning = responded(http, [tool, SEARCH], start, stream=stream)
    assert warning == '299 vllm-lite "not shown to the model: tools[1] web_search"'
    assert first["tools"][1] == SEARCH
    reasoning, call = first["output"]
    assert reasoning["content"][0]["text"].startswith("I need ")
    assert {name: call[name] for name in expected} == expected
    link = {"id": call["call_id"]} if output["type"] == "local_shell_call_output" else {"call_id": call["call_id"]}
    dropped = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    given = [*start, *first["output"], {**output, **link}, dropped]
    second, warning = responded(http, [tool, SEARCH], given, stream=stream)
    assert warning == '299 vllm-lite "not shown to the model: tools[1] web_search, input[5] web_search_call"'
    assert [item["type"] for item in second["output"]] == ["message"]
    assert second["output"][0]["content"][0]["text"] == DONE
    # The call that the history has is the one that the model wrote: all of the first prompt is found again.
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_search_of_tools_brings_them(http: httpx.Client) -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": FUNCTION}
    found: list[Any] = [
        {"role": "user", "content": "Ask another agent."},
        {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "agents"}},
        {"type": "tool_search_output", "call_id": "1", "execution": "client", "status": "completed", "tools": [AGENTS]},
        {"role": "user", "content": "Now ask."},
    ]
    response, warning = responded(http, [search], found, stream=True)
    assert not warning
    assert (response["output"][1]["name"], response["output"][1]["namespace"]) == ("spawn", "agents")


def test_a_call_that_is_cut_is_incomplete(http: httpx.Client) -> None:
    tools = [{"type": "custom", "name": "apply_patch"}]
    body = {"input": "Create hello.txt.", "tools": tools, "max_output_tokens": 5, "stream": True}
    answer = http.post("/v1/responses", json=body)
    response = check_stream(list(events_in(answer.text.splitlines())))
    call = response["output"][-1]
    assert (response["status"], call["type"], call["status"]) == ("incomplete", "custom_tool_call", "incomplete")
    assert PATCH.startswith(call["input"])


# ---- Claude Code

RULES = " ".join(f"Rule {number}: be kind to every file that you write." for number in range(400))
BASH: Any = {"name": "Bash", "description": "Run it.", "input_schema": FUNCTION}


def header(turn: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn * 7919:05x};"


def left(turn: int) -> str:
    return f"<total_tokens>{200_000 - 517 * turn} tokens left</total_tokens>"


@pytest.mark.parametrize("form", ["one text", "one block", "blocks"])
def test_twenty_turns_find_their_prefix_in_the_cache(http: httpx.Client, form: str) -> None:
    """The header, the count and the number of turns change; all but the last block of the turn before is found."""
    messages: list[Any] = []
    shared = cached = before = 0
    for turn in range(20):
        text = f"{header(turn)}\nThis is {form}. {RULES}\n{left(turn)}\nGo on."
        system: Any = text if form == "one text" else [{"type": "text", "text": text}]
        if form == "blocks":
            parts = [header(turn), f"This is {form}. {RULES}", left(turn), "Go on."]
            system = [{"type": "text", "text": part} for part in parts]
        messages.append({"role": "user", "content": [{"type": "text", "text": f"Do task {turn} of <total_tokens>."}]})
        messages.append({"role": "system", "content": f"{left(turn)}\nTask {turn} is small."})
        messages.append({"role": "system", "content": [{"type": "text", "text": left(turn)}]})
        body = {"model": "scripted", "max_tokens": 100, "system": system, "messages": messages, "tools": [BASH]}
        answer = http.post("/v1/messages", json=body).json()
        thinking, use = answer["content"]
        assert (thinking["type"], use["name"], answer["stop_reason"]) == ("thinking", "Bash", "tool_use")
        found = answer["usage"]["cache_read_input_tokens"]
        shared, cached = shared + before, cached + (found if turn else 0)
        before = found + answer["usage"]["input_tokens"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": f"done {turn}"}
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert shared > 20 * 4000
    assert cached >= 0.99 * shared


def test_every_door_is_steady(http: httpx.Client) -> None:
    """Prompts have the same number of tokens with and without the agent's header and count. Texts of users are not
    changed."""
    user = [{"role": "user", "content": f"Say {left(0)}"}, {"role": "user", "content": header(0)}]

    def counts(system: str, later: str) -> list[int]:
        chat = [{"role": "system", "content": system}, *user, {"role": "system", "content": later}]
        developer = [{**message, "role": message["role"].replace("system", "developer")} for message in chat]
        doors: list[tuple[str, Any]] = [
            ("/v1/chat/completions", {"messages": chat}),
            ("/v1/chat/completions", {"messages": developer}),
            ("/v1/chat/completions/batch", {"messages": [chat]}),
            ("/v1/messages", {"system": system, "messages": chat[1:]}),
            ("/v1/responses", {"instructions": system, "input": chat[1:]}),
            ("/v1/responses", {"input": chat}),
            ("/v1/responses", {"instructions": "Be brief.", "input": developer}),
            ("/api/chat", {"model": "scripted", "messages": chat, "stream": False}),
            ("/api/generate", {"model": "scripted", "system": system, "prompt": "Go on.", "stream": False}),
        ]
        found = []
        for path, body in doors:
            answer = http.post(path, json={"max_tokens": 1, **body})
            assert answer.status_code == 200, answer.text
            usage = answer.json().get("usage", answer.json())
            number = usage.get("prompt_tokens", usage.get("prompt_eval_count", usage.get("input_tokens")))
            found.append(number + usage.get("cache_read_input_tokens", 0))
        return found

    plain = counts("Be kind.", "Be brief.")
    assert counts(f"{header(1)}\nBe kind.\n{left(1)}", f"{left(2)}\nBe brief.") == plain
    assert counts("Be kind.", f"Be brief.\nThere are {left(2)}") > plain
