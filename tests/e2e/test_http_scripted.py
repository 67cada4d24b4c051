"""Scripted outputs in the whole product: a model writes given texts, and clients of each API get the right answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import client, serving
from tests.scripted import Script, write_scripted

TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPTS: list[Script | str] = [
    "Hello, 猫🙂 world.",
    f"<think>Hm.</think>\n\nI look.\n{CALL}",
    Script(["a ", "lot<", b"\xe7\x8c", b"\xab", "/x>"]),
    Script("So.</think>Yes.", begun="<think>"),
    Script(f"I need to look.\n{CALL}", begun="<think>"),
    f"Well.{CALL[: CALL.index('ris')]}",
]
SAID = [
    ("Hello, 猫🙂 world.", None, 0),
    ("I look.", "Hm.", 1),
    ("a lot<猫/x>", None, 0),
    ("Yes.", "So.", 0),
    (None, "I need to look.", 1),
    ("Well.", None, 1),
]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = write_scripted(tmp_path_factory.mktemp("scripted"), SCRIPTS, TOKENS, max_model_len=1000)
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with serving(str(folder), *flags) as server, client(server) as http:
        yield http


def answer(http: httpx.Client, *messages: dict[str, Any], **fields: Any) -> Any:
    found = http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "seed": 1, **fields})
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_model_writes_its_script(http: httpx.Client, number: int, temperature: float) -> None:
    asked = {"role": "user", "content": f"script {number}"}
    choice = answer(http, asked, temperature=temperature, return_token_ids=True)
    content, reasoning, num_calls = SAID[number]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == (content, reasoning)
    assert len(message.get("tool_calls", ())) == num_calls
    script = SCRIPTS[number]
    if isinstance(script, Script) and not isinstance(script.parts, str):
        assert len(choice["token_ids"]) == len(script.parts) + 1


def test_a_script_follows_the_results_of_tools(http: httpx.Client) -> None:
    """An agent's turns: script 0, and after the result of a tool script 1."""
    user: dict[str, Any] = {"role": "user", "content": "Hi"}
    assert answer(http, user)["message"]["content"] == SAID[0][0]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    found = answer(http, user, *turn, {"role": "tool", "tool_call_id": "c", "content": "x"})
    assert found["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("number", "stop", "kinds", "reason"),
    [
        (1, None, ["thinking", "text", "tool_use"], "tool_use"),
        (1, "ris", ["thinking", "text"], "stop_sequence"),
        (4, None, ["thinking", "tool_use"], "tool_use"),
        (4, "ris", ["thinking"], "stop_sequence"),
        (5, None, ["text"], "end_turn"),
    ],
)
def test_why_a_message_ends(http: httpx.Client, number: int, stop: str | None, kinds: list[str], reason: str) -> None:
    """There is no `tool_use` without its block, and a call that ends reasoning which was not closed is one."""
    body: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": f"script {number}"}]}
    body |= {"model": http.get("/v1/models").json()["data"][0]["id"], "stop_sequences": [] if stop is None else [stop]}
    body["tools"] = [{"name": "look", "input_schema": {"type": "object"}}]
    message = http.post("/v1/messages", json=body).json()
    assert [block["type"] for block in message["content"]] == kinds
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    stream = http.post("/v1/messages", json={**body, "stream": True}).text
    assert f'"stop_reason":"{reason}"' in stream
    assert stream.count('"type":"tool_use"') == kinds.count("tool_use") + (number == 5 or (number, stop) == (1, "ris"))
