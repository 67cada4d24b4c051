"""/derender: gives for generated token ids the same answer as the route of chats or completions."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http_server import client, serving

STORY = [{"role": "user", "content": "Tell me a story about a cat."}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'Yes. <tool_call>\n{"name": "get_weather", "arguments": {"a": "\u00e9\u2603"}}\n</tool_call>'
FIXED: dict[str, Any] = {"max_tokens": 14, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving("--tool-call-parser", "hermes") as server, client(server) as http:
        yield http


def post(http: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def generated(http: httpx.Client, rendered: dict[str, Any], **more: Any) -> Any:
    return post(http, "/inference/v1/generate", {**rendered, **more})


def choices(answer: dict[str, Any]) -> Any:
    """Return the choices, which have to be equal, without the field that only some answers have."""
    return [{name: value for name, value in choice.items() if name != "token_ids"} for choice in answer["choices"]]


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "top_logprobs": 3}, {"n": 2, "temperature": 1}, {"stop": ["e"]}]
)
def test_a_chat_is_shown_as_by_its_own_route(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {"messages": STORY, **FIXED, **more}
    rendered = post(http, "/v1/chat/completions/render", body)
    found = generated(http, rendered)
    asked = {"generate_response": found, "prompt_token_ids": rendered["token_ids"], "chat_request": body}
    shown, whole = post(http, "/v1/chat/completions/derender", asked), post(http, "/v1/chat/completions", body)
    assert choices(shown) == choices(whole)
    assert (shown["id"], shown["object"]) == (found["request_id"], "chat.completion")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert shown["usage"][name] == whole["usage"][name]


def test_completions_are_shown_prompt_by_prompt(http: httpx.Client) -> None:
    body = {"prompt": ["Once upon", "The cat"], "logprobs": 2, **FIXED}
    rendered = post(http, "/v1/completions/render", body)
    found = [generated(http, each) for each in rendered]
    asked: dict[str, Any] = {"generate_responses": found, "completion_request": body}
    shown = post(
        http, "/v1/completions/derender", {**asked, "prompt_tokens": [len(it["token_ids"]) for it in rendered]}
    )
    whole = post(http, "/v1/completions", body)
    assert choices(shown) == choices(whole)
    assert shown["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for name, value in (("prompt_tokens", [1]), ("prompt_token_ids", [[1]])):
        error = post(http, "/v1/completions/derender", {**asked, name: value}, 400)["error"]
        assert (error["param"], "2" in error["message"]) == (name, True)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_calls_and_characters_in_chunks(http: httpx.Client, size: int) -> None:
    """Each chunk is a separate request, with the state from the previous answer."""
    ids = post(http, "/tokenize", {"prompt": CALL})["tokens"]
    chat = {"messages": STORY, "tools": TOOLS}
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    state, text, names, arguments, roles = None, "", [], "", []
    for place, part in enumerate(parts):
        reason = "stop" if place == len(parts) - 1 else None
        choice = {"index": 0, "token_ids": part, "finish_reason": reason, "stop_reason": reason and "</tool_call>"}
        chunk = {"request_id": "r", "choices": [choice]}
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state, "chat_request": chat}
        answer = post(http, "/v1/chat/completions/derender", {**body, "prompt_token_ids": [1, 2]})
        state, (shown,) = answer["stream_state"], answer["chunk"]["choices"]
        roles.append(shown["delta"].get("role"))
        text += shown["delta"].get("content") or ""
        for call in shown["delta"].get("tool_calls") or ():
            names += [(call["id"], call["function"]["name"])] if "id" in call else []
            arguments += call["function"]["arguments"] or ""
    assert text.strip() == "Yes."
    assert [name for _, name in names] == ["get_weather"]
    assert json.loads(arguments) == {"a": "\u00e9\u2603"}
    assert shown["finish_reason"] == "tool_calls"
    assert roles == ["assistant", *[None] * (len(parts) - 1)]
    last = {"stream": True, "generate_chunk": {"request_id": "r", "choices": []}, "stream_state": state}
    usage = post(http, "/v1/chat/completions/derender", {**last, "prompt_tokens": 2})["chunk"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, len(ids))


def test_a_stream_of_a_completion(http: httpx.Client) -> None:
    body = {"prompt": "Once upon", "logprobs": 1, **FIXED}
    (rendered,) = post(http, "/v1/completions/render", body)
    state, text, offsets = None, "", []
    with http.stream("POST", "/inference/v1/generate", json={**rendered, "stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    named = {**chunks[0], "prompt_token_ids": [5, 6]}
    asked = {"stream": True, "generate_chunk": named, "completion_request": {**body, "return_token_ids": True}}
    assert post(http, "/v1/completions/derender", asked)["chunk"]["prompt_token_ids"] == [5, 6]
    for chunk in chunks:
        asked = {"stream": True, "generate_chunk": chunk, "stream_state": state, "completion_request": body}
        shown = post(http, "/v1/completions/derender", asked)
        state = shown["stream_state"]
        text += shown["chunk"]["choices"][0]["text"]
        offsets += (shown["chunk"]["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    whole = post(http, "/v1/completions", body)["choices"][0]
    assert (text, offsets) == (whole["text"], whole["logprobs"]["text_offset"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "generate_response"),
        ({"stream": True}, "generate_chunk"),
        ({"generate_response": {"choices": []}}, "choices"),
        ({"generate_response": {"output_mode": "text", "choices": [{}]}}, "output_mode"),
        ({"generate_response": {"choices": [{"token_ids": [1] * 5000}]}}, "max_model_len"),
        ({"generate_response": {"choices": [{"token_ids": [-1]}]}}, "token_ids"),
        ({"generate_response": {"choices": [{"token_ids": [1], "logprobs": {"content": []}}]}}, "logprobs of 0 tokens"),
        ({"stream": True, "generate_chunk": {"choices": [{}, {}]}}, "one choice"),
        ({"stream": True, "generate_chunk": {}, "chat_request": {"messages": STORY, "stop": "a"}}, "stop"),
        ({"stream": True, "generate_chunk": {}, "stream_state": {"output_token_ids": [1] * 5000}}, "max_model_len"),
        ({"model": "none", "generate_response": {"choices": [{}]}}, "does not exist"),
    ],
)
def test_answers_that_cannot_be_derendered(http: httpx.Client, body: dict[str, Any], says: str) -> None:
    status = 404 if "model" in body else 400
    assert says in post(http, "/v1/chat/completions/derender", body, status)["error"]["message"]


def test_only_a_token_that_stopped_an_answer_is_hidden(http: httpx.Client) -> None:
    ids = post(http, "/tokenize", {"prompt": "The answer is four.", "add_special_tokens": False})["tokens"]
    (end,) = post(http, "/tokenize", {"prompt": "<|eos|>", "add_special_tokens": False})["tokens"]
    for tokens, reason, stop, shown in (
        (ids, "stop", None, "The answer is four."),
        ([*ids, end], "stop", None, "The answer is four."),
        (ids, "stop", ids[-1], "The answer is four"),
        (ids, "stop", "x", "The answer is four."),
        (ids, "length", None, "The answer is four."),
    ):
        choice = {"token_ids": tokens, "finish_reason": reason, "stop_reason": stop}
        (found,) = post(http, "/v1/chat/completions/derender", {"generate_response": {"choices": [choice]}})["choices"]
        assert (found["message"]["content"], found["finish_reason"], found["stop_reason"]) == (shown, reason, stop)


def test_tokens_that_the_vocabulary_has_not_show_nothing(http: httpx.Client) -> None:
    score = {"token_id": 2**32 - 1, "logprob": -1e308, "top_logprobs": [{"token_id": 2**31, "logprob": -2, "rank": 1}]}
    choice = {"token_ids": [2**32 - 1], "logprobs": {"content": [score]}, "finish_reason": "length"}
    (shown,) = post(http, "/v1/chat/completions/derender", {"generate_response": {"choices": [choice]}})["choices"]
    assert shown["message"]["content"] == ""
