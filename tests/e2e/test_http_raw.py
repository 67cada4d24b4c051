"""Behaviour that only raw HTTP can show: malformed input, limits, keys, ids, the exact form of streams and errors."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deadlines import scaled
from tests.e2e.raw_server import JSON, KEY, LONG, OTHER_KEY, PROMPT, error_of, raw_server
from tests.http_server import Server, until
from vllm_lite import __version__
from vllm_lite.client.engines.session import Session

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with raw_server() as server:
        yield server


# ---- access


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_needs_no_key(server: Server, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \xe9"])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/metrics", "/ping", "/x", "/health/../v1/models", "/health//x"]
)
def test_everything_else_needs_a_key(server: Server, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key.encode("latin-1")}
    error = error_of(httpx.get(server.url + path, headers=headers), 401)  # type: ignore[arg-type]
    assert error["type"] == "AuthenticationError"
    assert KEY not in error["message"]


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_every_key_opens(server: Server, key: str) -> None:
    headers = {"Authorization": f"bearer {key}", "Host": "localhost/health"}
    assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200


def test_keys_are_not_logged(server: Server) -> None:
    assert KEY not in server.output
    assert OTHER_KEY not in server.output


def test_other_pages_may_ask_if_allowed(server: Server) -> None:
    """A browser also asks whether a page of the internet may call this machine."""
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    for origin, status in (("https://example.org", 200), ("https://example.com", 400)):
        answer = httpx.options(server.url + "/v1/completions", headers={"Origin": origin, **asked})
        assert answer.status_code == status
        assert ("access-control-allow-origin" in answer.headers) == (status == 200)
        if status == 200:
            assert answer.headers["access-control-allow-private-network"] == "true"


# ---- ids and forms


def test_a_request_id_is_returned(http: httpx.Client) -> None:
    assert http.get("/version", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {http.get("/version", headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("", "a b")}
    assert len(made) == 2
    assert made.isdisjoint({"", "a b"})


def test_version_and_load(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/load").json() == {"server_load": 0}


def test_the_form_of_a_stream(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_characters_are_never_split(http: httpx.Client) -> None:
    """The model's text has characters of several tokens; each chunk is whole JSON and whole UTF-8."""
    body = {"prompt": PROMPT + " there was a", "temperature": 0, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert any(ord(character) > 127 for character in "".join(texts))
    assert "\ufffd" not in "".join(texts)


def test_an_ignored_field_is_reported(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "brand_new": 1, "bad\r\nname": 2}
    warning = http.post("/v1/completions", json=body).headers["warning"]
    assert "brand_new" in warning
    assert "bad??name" in warning


def test_tokens_there_and_back(http: httpx.Client) -> None:
    told = http.post("/tokenize", json={"prompt": "Łucja and a cat", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"].endswith("Łucja and a cat")
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|bos|><|user|>Hi<|end|><|assistant|>"
    error_of(http.post("/tokenize", json={}), 400)
    for place, token_id in ((0, -1), (1, 2048), (1, 2**40)):
        error = error_of(http.post("/detokenize", json={"tokens": [5] * place + [token_id]}), 400)
        assert error["param"] == "tokens"
        assert re.fullmatch(
            rf"token ids must be between 0 and \d+, got {token_id} at position {place}, which is out of vocabulary",
            error["message"],
        )


def test_an_error_names_the_prompt_among_several(http: httpx.Client) -> None:
    for prompt, text in (
        ([[5], []], "prompt[1]: the prompt is empty"),
        ([[5], [6], [2048]], "prompt[2]: token ids must be between 0 and 2047, got 2048"),
        (["a", "b " * 3000], "prompt[1]: This model's maximum context length is 2048 tokens"),
        ([[]], "the prompt is empty"),
    ):
        error = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()["error"]
        assert error["message"].startswith(text), error
        assert error["param"] == "prompt"
    other = error_of(http.post("/v1/completions", json={"prompt": ["a", "b"], "stop_token_ids": [4096]}), 400)
    assert other["message"].startswith("stop_token_ids must be between")


def test_tokens_in_and_out(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    params = {"temperature": 0, "max_tokens": 5, "logprobs": 1}
    whole = http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": params}).json()
    assert whole["request_id"].startswith("gen-")
    choice = whole["choices"][0]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    for entry in choice["logprobs"]["content"]:
        first = entry["top_logprobs"][0]
        assert [first[name] for name in ("token_id", "logprob", "rank")] == [entry["token_id"], entry["logprob"], 1]
    asked = {"prompt": ids, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"] == choice["token_ids"]
    body = {"token_ids": ids, "sampling_params": params, "stream": True}
    events = http.post("/inference/v1/generate", json=body).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    bad = {"token_ids": ids, "sampling_params": {"guided_json": {"type": "objekt"}}}
    assert error_of(http.post("/inference/v1/generate", json=bad), 400)["param"] == "guided_json"
    assert error_of(http.post("/inference/v1/generate", json={"token_ids": [-1]}), 400)["param"] == "token_ids"


def test_token_ids_as_prompts_return_token_ids_and_text(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    params = {"temperature": 0, "max_tokens": 5, "logprobs": 0}
    body: dict[str, Any] = {
        "token_ids": ids,
        "sampling_params": params,
        "output_mode": "text",
        "return_token_ids": True,
    }
    whole = http.post("/inference/v1/generate", json=body).json()
    choice = whole["choices"][0]
    text = http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
    assert (whole["prompt_token_ids"], whole["output_mode"]) == (ids, "text")
    assert choice["text"] == text == "".join(entry["token"] for entry in choice["logprobs"]["content"])
    events = http.post("/inference/v1/generate", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert {chunk["output_mode"] for chunk in chunks} == {"text"}
    ids_alone = http.post("/inference/v1/generate", json={**body, "output_mode": "tokens"}).json()["choices"][0]
    assert "text" not in ids_alone
    assert [len(entry["top_logprobs"]) for entry in ids_alone["logprobs"]["content"]] == [1] * 5
    error = error_of(http.post("/inference/v1/generate", json={**body, "output_mode": "derender"}), 400)
    assert error["param"] == "output_mode"
    for more in (body, {"token_ids": ids, "sampling_params": {"stop": ["a"]}}):
        silent = {**more, "sampling_params": {**more["sampling_params"], "detokenize": False}}
        assert error_of(http.post("/inference/v1/generate", json=silent), 400)["param"] == "detokenize"


def test_the_default_of_max_tokens_is_the_remaining_context(http: httpx.Client) -> None:
    """As in vLLM, and other than for completions, where the default is 16."""
    params = {"temperature": 0, "ignore_eos": True}
    whole = http.post("/inference/v1/generate", json={"token_ids": [3] * 2000, "sampling_params": params}).json()
    assert whole["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "top_logprobs"])
def test_logprobs_of_the_whole_vocabulary_are_refused(http: httpx.Client, name: str) -> None:
    body: dict[str, Any] = {"prompt": "a", name: -1}
    if name == "top_logprobs":
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, name: -1}
    error = error_of(http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body), 400)
    assert "whole vocabulary" in error["message"]
    assert error["param"] == name


def test_the_document_names_every_route_and_field(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            answer = http.request(method, re.sub(r"{re\w+}", "none", path.replace("{model}", "demo_model")))
            assert answer.status_code != 405, path
            assert answer.status_code != 404 or re.search("no (request|response) 'none'", answer.text), path
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "logprobs", "stream", "top_k"} <= set(fields)
    for path in ("/", "/docs", "/redoc"):
        page = http.get(path)
        assert "openapi.json" in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")


# ---- malformed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud80"}',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "n": 99999999999999999999999}',
        b'{"prompt": "x", "max_tokens": 1.5}',
        b'{"prompt": "x", "stop": [[]]}',
        b'{"prompt": "x", "stop": ""}',
        b'{"prompt": "x", "stream_options": 3}',
        b'{"prompt": null}',
        b'{"model": "demo"}',
        b'{"prompt": "x", "unknown": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": "x", "tools": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": [[]]}',
        b'{"prompt": [true, false]}',
        b'{"prompt": "x", "logit_bias": {"a": 1}}',
        b'{"prompt": "x", "request_id": "a b"}',
        b'{"prompt": "x", "user": "' + b"u" * 300 + b'"}',
        b'{"prompt": "x", "cache_salt": "' + b"u" * 300 + b'"}',
    ],
)
def test_a_malformed_body_is_refused(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error_of(http.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/nothing", 404), ("PUT", "/health", 405)],
)
def test_wrong_routes_have_the_shape_of_errors(http: httpx.Client, method: str, path: str, status: int) -> None:
    error_of(http.request(method, path), status)


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_is_not_declared_as_json_is_refused(http: httpx.Client, kind: str | None) -> None:
    """A web page may send bodies of these types, and without a type, to any server without permission."""
    headers = {} if kind is None else {"Content-Type": kind}
    for path in ("/v1/completions", "/tokenize", "/v1/requests/none/fork"):
        error = error_of(http.post(path, content=b'{"prompt": "x", "max_tokens": 1}', headers=headers), 415)
        assert "application/json" in error["message"]


# ---- aborts and queues


def test_a_request_can_be_aborted_by_its_id(http: httpx.Client, session: Session) -> None:
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "request_id": "mine"}) as answer:
        lines = answer.iter_lines()
        assert '"id":"cmpl-mine"' in next(lines)
        state = http.get("/v1/requests/cmpl-mine").json()
        assert (state["id"], state["state"]) == ("cmpl-mine", "running")
        again = http.post("/v1/completions", json={**LONG, "request_id": "mine"})
        error_of(again, 409)
        assert http.delete("/v1/requests/cmpl-mine").json()["deleted"] is True
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    error_of(http.delete("/v1/requests/cmpl-mine"), 404)
    error_of(http.get("/v1/requests/cmpl-mine"), 404)
    until(lambda: session.stats().num_used_blocks == 0, "the end of an aborted request")


def test_the_prompts_of_a_list_take_no_id_of_another_request(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "request_id": "list-1"}) as answer:
        assert next(lines := answer.iter_lines()), lines
        several = {"prompt": ["a", "b"], "max_tokens": 1}
        for name, status in {"list": 200, "list-1": 409}.items():
            assert http.post("/v1/completions", json={**several, "request_id": name}).status_code == status


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_vanish_leave_nothing(server: Server, session: Session, stream: bool) -> None:
    """Clients disconnect one after the other, during their answers, or while they wait for a place in the batch. A
    client for which the queue has no place is refused."""
    before = session.stats().generated_tokens

    def see_enough(place: int, request: "asyncio.Future[httpx.Response]") -> None:
        enough = before + 1 + 5 * place
        until(lambda: request.done() or session.stats().generated_tokens >= enough, f"{enough} tokens")

    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=scaled(60)) as http:
        bodies = [{**LONG, "stream": stream, "n": 1 + place % 2} for place in range(6)]
        asking = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for body in bodies]
        for place, each in enumerate(asking):
            await asyncio.to_thread(see_enough, place, each)
            each.cancel()
        await asyncio.wait(asking, timeout=scaled(30))
    assert sum(each.cancelled() for each in asking) >= 2
    until(lambda: session.stats().num_used_blocks == 0, "the end of what was abandoned")
    stats = session.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.generated_tokens > before


async def test_a_full_queue_refuses(server: Server, session: Session) -> None:
    """Four sequences are in a batch and two may wait: of twelve at once six are served."""

    async def num_rejected(http: httpx.AsyncClient) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        name, limit = "vllm:admission_rejections_total{", 'reason="max_num_queued_reqs"'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and limit in line)

    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=scaled(60)) as http:
        body = {**LONG, "max_tokens": 300}
        before = await num_rejected(http)
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(12)))
        assert await num_rejected(http) == before + 6
    assert sorted(answer.status_code for answer in answers) == [200] * 6 + [429] * 6
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert error_of(refused, 429)["type"] == "RateLimitError"
    assert int(refused.headers["retry-after"]) >= 1
    assert session.stats().num_running == 0
