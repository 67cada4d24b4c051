"""Ollama's API on a real server, also as its official client for Python sees it."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import jsonschema
import pytest

from tests.deadlines import scaled
from tests.http_server import ANIMAL, Server, client, serving

TEMPLATE = """{{- bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>{{ message.name }}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}{% if not enable_thinking %}<think></think>{% endif %}<|assistant|>
{%- if enable_thinking %}<think>{% endif %}{% endif %}"""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "description": "it does", "parameters": ANIMAL}}]
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a cat."}]
FIXED: dict[str, Any] = {"temperature": 0, "num_predict": 12}
BODY: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "options": FIXED}
PROMPT: dict[str, Any] = {"model": "demo", "prompt": "Tell me a story about a cat.", "options": FIXED}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--served-model-name", "demo"]
    with serving(*flags, template=TEMPLATE) as server:
        yield server


def post(http: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = http.post(path, json={"stream": False, **body})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def as_chat(http: httpx.Client, **fields: Any) -> str:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **fields}
    return str(http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_needs_no_type_unless_a_web_page_sends_it(http: httpx.Client, kind: str | None) -> None:
    """`curl -d` and litellm send such bodies. A web page may send them to any server without permission, but then a
    header of the browser shows that it is a page."""
    headers = {} if kind is None else {"Content-Type": kind}
    content = json.dumps({**PROMPT, "stream": False}).encode()
    assert http.post("/api/generate", content=content, headers=headers).json()["done"]
    assert http.post("/api/show", content=b"{}", headers=headers).status_code == 200
    for mark, value in (("Origin", "http://localhost:3000"), ("Sec-Fetch-Site", "cross-site")):
        for path in ("/api/generate", "/api/chat", "/api/show", "/api/pull"):
            answer = http.post(path, content=content, headers={**headers, mark: value})
            assert answer.status_code == 415, path
            assert "application/json" in answer.json()["error"]


def test_a_chat_equals_that_of_openais_api(http: httpx.Client) -> None:
    whole = post(http, "/api/chat", BODY)
    assert len(whole["message"]["content"]) > 20
    assert whole["message"] == {"role": "assistant", "content": as_chat(http)}
    assert (whole["model"], whole["done"], whole["done_reason"], whole["eval_count"]) == ("demo", True, "length", 12)
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    *parts, last = lines(http, "/api/chat", BODY)
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert last["message"]["content"] == ""
    assert {name: type(value) for name, value in last.items()} == {name: type(value) for name, value in whole.items()}


def test_a_prompt_is_a_chat_of_one_message_or_raw(http: httpx.Client) -> None:
    whole = post(http, "/api/generate", PROMPT)
    assert whole["response"] == as_chat(http)
    assert "".join(part["response"] for part in lines(http, "/api/generate", PROMPT)) == whole["response"]
    system = post(http, "/api/generate", {**PROMPT, "system": "Be brief."})
    assert system["prompt_eval_count"] > whole["prompt_eval_count"]
    raw = post(http, "/api/generate", {**PROMPT, "raw": True, "prompt": "Once upon a time"})
    assert raw["response"]
    plain = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
    assert raw["response"] == http.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    assert "suffix" in post(http, "/api/generate", {**PROMPT, "suffix": "end"}, 400)["error"]


def test_options_are_heeded_and_the_others_named(http: httpx.Client) -> None:
    full = post(http, "/api/chat", BODY)["message"]["content"]
    stop = full.split()[2]
    answer = http.post(
        "/api/chat",
        json={**BODY, "stream": False, "keep_alive": "5m", "options": {**FIXED, "stop": [stop], "num_ctx": 64}},
    )
    assert answer.json()["done_reason"] == "stop"
    assert stop not in answer.json()["message"]["content"]
    assert "options.num_ctx" in answer.headers["warning"]
    warm = {"temperature": 1.8, "num_predict": 12}
    drawn = [post(http, "/api/chat", {**BODY, "options": {**warm, "seed": seed}})["message"] for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert drawn[2:] != drawn[:2]
    assert post(http, "/api/chat", {**BODY, "options": {"num_predict": -1, "stop": "."}})["eval_count"] > 1


@pytest.mark.parametrize("form", ["json", ANIMAL])
def test_forms(http: httpx.Client, form: Any) -> None:
    num_tokens = 12 if form == "json" else 200
    body = {"format": form, "options": {"num_predict": num_tokens, "temperature": 0}}
    for path, more in (("/api/chat", BODY), ("/api/generate", PROMPT)):
        whole = post(http, path, {**more, **body})
        text = whole["response"] if "response" in whole else whole["message"]["content"]
        if form == "json":
            assert text.lstrip()[0] == "{"
        else:
            jsonschema.validate(json.loads(text), ANIMAL)


def test_earlier_calls_and_results_are_shown(http: httpx.Client) -> None:
    function = {"name": "look", "arguments": {"animal": "fox", "age": 3}}
    said = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_name": "look", "content": "gone"},
    ]
    same = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "name": "look", "content": "gone"},
    ]
    count = http.post("/tokenize", json={"messages": same, "tools": TOOLS}).json()["count"]
    assert post(http, "/api/chat", {**BODY, "messages": said, "tools": TOOLS})["prompt_eval_count"] == count


def test_thinking_is_separate_from_the_answer(http: httpx.Client) -> None:
    body = {**BODY, "think": True, "format": ANIMAL, "options": {"num_predict": 12, "temperature": 0}}
    thought = post(http, "/api/chat", body)["message"]
    assert thought["thinking"]
    assert thought["content"] == ""
    assert "thinking" not in post(http, "/api/chat", {**body, "think": False})["message"]
    for effort in ("low", "max"):
        assert lines(http, "/api/generate", {**PROMPT, "think": effort})[0]["thinking"]
    assert "think" in post(http, "/api/chat", {**body, "think": "deeply"}, 400)["error"]


def test_logprobs(http: httpx.Client) -> None:
    raw = {**PROMPT, "raw": True, "prompt": "Once upon a time"}
    for path, body in (("/api/chat", BODY), ("/api/generate", PROMPT), ("/api/generate", raw)):
        scored = {**body, "logprobs": True, "top_logprobs": 2}
        found = post(http, path, scored)["logprobs"]
        assert [len(each["top_logprobs"]) for each in found] == [2] * 12
        assert [each for part in lines(http, path, scored) for each in part.get("logprobs", ())] == found


def test_served_models_are_listed(http: httpx.Client) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "demo:latest"
    assert model["size"] > 0
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] > 0
    shown = post(http, "/api/show", {"model": model["name"]})
    assert set(shown["capabilities"]) == {"completion", "tools", "thinking"}
    assert shown["template"] == "", "shown where --enable-tokenizer-info-endpoint is given"
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == running["context_length"]
    assert http.get("/api/version").json()["version"]
    assert http.head("/").status_code == 200
    assert http.post("/api/pull", json={"model": "demo"}).json() == {"status": "success"}
    assert post(http, "/api/chat", {**BODY, "model": "demo:latest"})["model"] == "demo:latest"


def test_the_model_is_loaded(http: httpx.Client) -> None:
    assert post(http, "/api/generate", {"model": "demo"})["done_reason"] == "load"
    (line,) = lines(http, "/api/chat", {"model": "demo", "messages": [], "keep_alive": 0})
    assert (line["done_reason"], line["message"]["content"]) == ("unload", "")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/chat", {**BODY, "model": "other:7b"}, 404, "other:7b"),
        ("/api/show", {"model": "other"}, 404, "other"),
        ("/api/chat", {**BODY, "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "messages[0]"),
        ("/api/generate", {**PROMPT, "images": ["aGk="]}, 400, "images"),
        ("/api/chat", {**BODY, "options": {"temperature": "hot"}}, 400, "temperature"),
        ("/api/chat", {**BODY, "options": {"temperature": -1}}, 400, "temperature"),
        ("/api/chat", {**BODY, "format": "xml"}, 400, "format"),
        ("/api/chat", {**BODY, "messages": [{"role": "robot", "content": "x"}]}, 400, "robot"),
        ("/api/embed", {"model": "demo", "input": "x"}, 400, "it generates text; start it with --convert embed"),
        ("/api/delete", {"model": "demo"}, 404, "/api/delete"),
    ],
)
def test_errors_are_sentences(http: httpx.Client, path: str, body: Any, status: int, says: str) -> None:
    assert says in post(http, path, body, status)["error"]


def test_keys_are_asked_for_in_this_form_too() -> None:
    with serving("--api-key", "sk-ollama") as server, client(server) as http:
        assert isinstance(post(http, "/api/chat", BODY, 401)["error"], str)
        assert http.get("/api/tags", headers={"Authorization": "Bearer sk-ollama"}).status_code == 200


def test_the_official_client(server: Server) -> None:
    ollama = pytest.importorskip("ollama")
    with closing(ollama.Client(host=server.url, timeout=scaled(60))) as api:
        official(api, ollama.ResponseError)


def official(api: Any, error: type[Exception]) -> None:
    whole = api.chat("demo", MESSAGES, options=FIXED)
    parts = list(api.chat("demo", MESSAGES, options=FIXED, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done_reason == "length"
    assert api.generate("demo", PROMPT["prompt"], options=FIXED).response == whole.message.content
    shaped = api.chat("demo", MESSAGES, format=ANIMAL, options={"num_predict": 200, "temperature": 0})
    jsonschema.validate(json.loads(shaped.message.content), ANIMAL)
    assert api.list().models[0].model == "demo:latest"
    assert api.show("demo").capabilities
    assert api.ps().models[0].size > 0
    with pytest.raises(error, match="other") as caught:
        api.chat("other", MESSAGES)
    assert getattr(caught.value, "status_code", None) == 404
    with pytest.raises(error, match="it generates text; start it with --convert embed"):
        api.embed("demo", "text")
