"""The routes that vLLM has beside OpenAI's, on a real server."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deadlines import scaled
from tests.http_server import Server, client, serving

KEY, ADMIN = "sk-vllm", "sk-admin"
HEADERS = {"Authorization": f"Bearer {KEY}"}
STORY = [{"role": "user", "content": "Tell me a story about a cat."}]
OTHER = [{"role": "user", "content": "Tell me a story about a dog."}]
FIXED: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--api-key", KEY, "--admin-api-key", ADMIN, "--enable-tokenizer-info-endpoint", "--max-num-seqs", "4"]
    with serving(*flags) as server:
        yield server


def post(http: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


def chat(http: httpx.Client, messages: list[dict[str, str]], **more: Any) -> Any:
    return post(http, "/v1/chat/completions", {"messages": messages, **FIXED, **more})


def test_several_chats_have_a_choice_each(http: httpx.Client) -> None:
    alone = [chat(http, messages) for messages in (STORY, OTHER)]
    together = post(http, "/v1/chat/completions/batch", {"messages": [STORY, OTHER], **FIXED})
    assert together["object"] == "chat.completion"
    assert [choice["index"] for choice in together["choices"]] == [0, 1]
    texts = [choice["message"]["content"] for choice in together["choices"]]
    assert texts == [one["choices"][0]["message"]["content"] for one in alone]
    assert texts[0] != texts[1]
    assert together["usage"]["completion_tokens"] == 24
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


@pytest.mark.parametrize(
    ("field", "value"), [("stream", True), ("n", 2), ("tools", [{"type": "function", "function": {"name": "f"}}])]
)
def test_unsupported_fields_of_batches_of_chats(http: httpx.Client, field: str, value: Any) -> None:
    body = {"messages": [STORY], field: value}
    assert field in post(http, "/v1/chat/completions/batch", body, 400)["error"]["message"]


def test_a_form_holds_all_of_several_chats(http: httpx.Client) -> None:
    body = {"messages": [STORY, OTHER], "structured_outputs": {"choice": ["yes", "no"]}}
    choices = post(http, "/v1/chat/completions/batch", body)["choices"]
    assert {choice["message"]["content"] for choice in choices} <= {"yes", "no"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": [" "]},
        {"structured_outputs": {"regex": "[a-c]{4}"}, "top_k": 3},
    ],
)
def test_a_rendered_prompt_generates_the_same(http: httpx.Client, more: dict[str, Any]) -> None:
    whole = chat(http, STORY, **more, return_token_ids=True)
    rendered = post(http, "/v1/chat/completions/render", {"messages": STORY, **FIXED, **more})
    assert rendered["token_ids"] == whole["prompt_token_ids"]
    generated = post(http, "/inference/v1/generate", rendered)
    assert generated["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert (generated["choices"][0]["logprobs"] is None) == ("logprobs" not in more)


@pytest.mark.parametrize("more", [{}, {"output_mode": "text"}])
def test_a_stream_of_token_ids_begins_with_the_prompts(http: httpx.Client, more: dict[str, str]) -> None:
    body = {"token_ids": [5, 6], "sampling_params": FIXED, "stream": True, "return_token_ids": True, **more}
    lines = http.post("/inference/v1/generate", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[5, 6]] + [None] * (len(chunks) - 1)
    (first,) = chunks[0]["choices"]
    assert (first["token_ids"], first.get("text")) == ([], "" if more else None)
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 12


def test_a_completion_is_rendered_prompt_by_prompt(http: httpx.Client) -> None:
    one, two = post(
        http, "/v1/completions/render", {"prompt": ["Once upon", "The cat"], **FIXED, "seed": 3, "priority": 2}
    )
    assert one["request_id"] != two["request_id"]
    assert one["token_ids"] == post(http, "/tokenize", {"prompt": "Once upon"})["tokens"]
    assert two["sampling_params"]["seed"] == 3
    assert two["priority"] == 2


def test_calls_that_must_be_made_are_not_rendered(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": STORY, "tools": tools, "tool_choice": "required"}
    assert "tool_choice" in post(http, "/v1/chat/completions/render", body, 400)["error"]["message"]


def test_messages_and_responses_are_rendered_as_the_chats_that_they_are(http: httpx.Client) -> None:
    wanted = post(http, "/v1/chat/completions/render", {"messages": STORY, **FIXED})
    found = [
        post(http, "/v1/messages/render", {"messages": STORY, "model": "demo_model", "max_tokens": 12}),
        post(http, "/v1/responses/render", {"input": STORY[0]["content"], "max_output_tokens": 12}),
    ]
    for each in found:
        assert each["token_ids"] == wanted["token_ids"]
        assert each["sampling_params"]["max_tokens"] == 12
        assert post(http, "/inference/v1/generate", each)["usage"]["completion_tokens"] <= 12
    body = {"input": "Hi", "previous_response_id": "resp_1"}
    assert post(http, "/v1/responses/render", body, 400)["error"]["param"] == "previous_response_id"


def test_the_request_id_of_a_header_overrides_that_of_the_body(http: httpx.Client) -> None:
    body = {"prompt": "Once upon", "request_id": "body"}
    named = [http.post("/v1/completions/render", json=body, headers=it) for it in ({"X-Request-Id": "header"}, {})]
    assert [answer.json()[0]["request_id"] for answer in named] == ["cmpl-header", "cmpl-body"]


def test_a_rendered_prompt_has_the_offsets_of_its_tokens(http: httpx.Client) -> None:
    text = "Once upon a time, \N{SNOWMAN}"
    (found,) = post(http, "/v1/completions/render", {"prompt": text, "return_token_offsets": True})
    pieces = post(http, "/tokenize", {"prompt": text, "return_token_strs": True})["token_strs"]
    assert len(found["token_offsets"]) == len(found["token_ids"])
    shown = [text[start:end] for start, end in found["token_offsets"]]
    assert [piece.replace("\u0120", " ") for piece in pieces][1:4] == shown[1:4]
    assert found["token_offsets"][0] == [0, 0]
    (cut,) = post(
        http, "/v1/completions/render", {"prompt": text, "return_token_offsets": True, "truncate_prompt_tokens": 3}
    )
    assert cut["token_ids"] == [found["token_ids"][0], *found["token_ids"][-2:]]
    assert cut["token_offsets"] == [[0, 0], *found["token_offsets"][-2:]]
    chats = post(http, "/v1/chat/completions/render", {"messages": STORY, "return_token_offsets": True})
    assert len(chats["token_offsets"]) == len(chats["token_ids"])
    assert (
        post(http, "/v1/completions/render", {"prompt": [5, 6], "return_token_offsets": True})[0]["token_offsets"]
        is None
    )


def test_invocations(http: httpx.Client) -> None:
    answer = post(http, "/invocations", {"messages": STORY, **FIXED})
    assert answer["choices"][0]["message"] == chat(http, STORY)["choices"][0]["message"]
    assert post(http, "/invocations", {"prompt": "Once upon", **FIXED})["object"] == "text_completion"
    assert "prompt" in post(http, "/invocations", {"input": "x"}, 400)["error"]["message"]
    bad = http.post("/invocations", content=b"[1, 2", headers={"Content-Type": "application/json"})
    assert (bad.status_code, "Expected `object`" in bad.text) == (400, True)


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
def test_requests_end_by_the_names_that_clients_gave_them(http: httpx.Client, path: str) -> None:
    name = f"mine-{len(path)}"
    body = {"prompt": "Once upon", "max_tokens": 1900, "ignore_eos": True, "stream": True, "request_id": name}
    with http.stream("POST", "/v1/completions", json=body, timeout=scaled(60)) as answer:
        lines = answer.iter_lines()
        next(lines)  # it runs
        ended = threading.Thread(target=post, args=(http, path, {"request_ids": ["nobody", name]}))
        ended.start()
        rest = list(lines)
        ended.join(scaled(60))
    assert '"finish_reason":"abort"' in "".join(rest)
    post(http, path, {"request_ids": [name]})
    assert "request_ids" in post(http, path, {}, 400)["error"]["message"]


def test_server_info_is_for_admins(server: Server, http: httpx.Client) -> None:
    assert http.get("/server_info").status_code == 403
    admin = {"Authorization": f"Bearer {ADMIN}"}
    as_text = http.get("/server_info", headers=admin).json()
    as_json = http.get("/server_info?config_format=json", headers=admin).json()
    assert "max_num_seqs: 4" in as_text["vllm_config"]
    assert as_json["vllm_config"]["max_num_seqs"] == 4
    assert not {KEY, ADMIN} & set(str(as_json).split("'"))
    assert http.get("/server_info?config_format=xml", headers=admin).status_code == 400


def test_tokenizer_info(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["tokenizer_class"]
    assert "messages" in info["chat_template"]


def test_flags_of_vllm_change_answers() -> None:
    """Answers below a proxy's path and without it; tokens by their ids; usage in every chunk; the load, if a request
    asks for it."""
    flags = ("--root-path", "/llm", "--return-tokens-as-token-ids", "--enable-force-include-usage")
    with serving(*flags, "--log-level", "error") as server, client(server) as http:
        body = {"prompt": "Once upon a", "max_tokens": 4, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        headers = {"endpoint-load-metrics-format": "JSON"}
        answers = [http.post(path, json=body, headers=headers) for path in ("/v1/completions", "/llm/v1/completions")]
        one, other = (answer.json()["choices"][0] for answer in answers)
        assert one == other
        assert [name.partition(":")[0] for name in one["logprobs"]["tokens"]] == ["token_id"] * 4
        assert '"num_requests_waiting":' in answers[0].headers["endpoint-load-metrics"]
        named = http.post("/v1/completions", json={**body, "logprob_token_ids": [5, 6], "logprobs": 0}).json()
        drawn = one["logprobs"]["tokens"]
        for token, found in zip(drawn, named["choices"][0]["logprobs"]["top_logprobs"], strict=True):
            assert list(found) == list(dict.fromkeys([token, "token_id:5", "token_id:6"]))
        plain = http.post("/v1/completions", json={**body, "return_tokens_as_token_ids": False}).json()
        assert "".join(plain["choices"][0]["logprobs"]["tokens"]) == one["text"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
        lines = [line[6:] for line in http.post("/llm/v1/chat/completions", json=chat).text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        assert all(json.loads(line)["usage"]["prompt_tokens"] > 0 for line in lines)
        assert json.loads(lines[-1])["choices"] == []
        long = {**body, "max_tokens": 400, "stream": True, "request_id": "trunk"}
        with http.stream("POST", "/v1/completions", json=long) as trunk:
            next(trunk.iter_lines())
            fork = http.post("/v1/requests/cmpl-trunk/fork", json={"max_tokens": 300, "stream": True}).text
        assert all(json.loads(line[6:])["usage"]["prompt_tokens"] > 0 for line in fork.split("\n\n")[:-2])
        assert http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert http.get("/llm").headers["location"] == "llm/"
