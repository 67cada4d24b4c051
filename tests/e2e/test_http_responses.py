"""/v1/responses on a real server, as OpenAI's package sees it.

The demo model's template is replaced by one with the literals of hermes and of Qwen's reasoning; only grammars give its
answers the right form.
"""

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import msgspec
import openai
import pydantic
import pytest
from openai import OpenAI
from openai.types.responses.response_item_list import ResponseItemList

from tests.deadlines import scaled
from tests.e2e.test_http_tools import TEMPLATE
from tests.http_server import ANIMAL, Server, children, serving, until
from tests.response_events import broken_stream, check_stream, checked, events_in

KEY, OTHER_KEY = "sk-one", "sk-two"
SMALL_BODIES = ("--max-request-bytes", "300000", "--served-model-name", "demo")
FIXED: dict[str, Any] = {"model": "demo", "temperature": 0.0, "input": "Tell me a story."}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "it does", "parameters": ANIMAL, "strict": None}
    for name in ("look", "ask")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("responses")
    flags = ["--reasoning-parser", "qwen3", "--api-key", KEY, "--api-key", OTHER_KEY, "--served-model-name", "demo"]
    with serving(*flags, "--responses-store", str(folder / "store.db"), template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=scaled(60)) as api:
        yield api


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url + "/v1", timeout=scaled(60), headers=headers) as http:
        yield http


def post(http: httpx.Client, path: str = "/responses", status: int = 200, **fields: Any) -> Any:
    body = {**FIXED, **fields} if path == "/responses" else fields
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def get(http: httpx.Client, path: str, status: int = 200) -> Any:
    answer = http.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/responses", json={**FIXED, **fields, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_in(answer.iter_lines()))


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


# ---- answers


def test_a_response_has_all_of_its_fields(http: httpx.Client) -> None:
    more: dict[str, Any] = {"metadata": {"a": "b"}, "user": "me", "instructions": "Be brief.", "truncation": "auto"}
    found = post(http, max_output_tokens=8, **more)
    response = checked(found)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert {name: found[name] for name in more} == more
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == 8 + response.usage.input_tokens
    assert get(http, f"/responses/{response.id}") == found


@pytest.mark.parametrize(
    "more",
    [
        {"max_output_tokens": 12},
        {"max_output_tokens": 12, "store": False},
        {"max_output_tokens": 12, "background": True},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 6},
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200, "temperature": 1.0, "seed": 5},
        {"structured_outputs": {"regex": "[a-c]{4}"}, "top_k": 3},
        {
            "structured_outputs": {"regex": "[a-f]{6}"},
            "max_output_tokens": 200,
            "stop": ["e"],
        },
    ],
)
def test_a_stream_adds_up_to_the_response(http: httpx.Client, more: dict[str, Any]) -> None:
    events = streamed(http, **more)
    response = check_stream(events)
    checked(response)
    if more.get("store") is False:
        get(http, f"/responses/{response['id']}", 404)
        return
    assert get(http, f"/responses/{response['id']}") == response
    whole = post(http, **{**more, "background": None})
    assert text_of(whole) == text_of(response)
    assert whole["usage"]["output_tokens"] == response["usage"]["output_tokens"]


def test_logprobs_are_those_of_a_chat(http: httpx.Client) -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 6}
    part = post(http, **more)["output"][0]["content"][0]
    messages = [{"role": "user", "content": FIXED["input"]}]
    body: dict[str, Any] = {
        "messages": messages,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 6,
    }
    assert part["logprobs"] == post(http, "/chat/completions", **body)["choices"][0]["logprobs"]["content"]


def test_the_package_streams_and_parses(api: OpenAI) -> None:
    class Animal(pydantic.BaseModel):
        animal: Literal["bear", "fox"]
        is_big: bool

    kinds = set()
    with api.responses.stream(**FIXED, max_output_tokens=9) as stream:
        for event in stream:
            kinds.add(event.type)
        final = stream.get_final_response() if "response.completed" in kinds else None
    assert "response.output_text.delta" in kinds
    assert final is None or final.output_text
    parsed = api.responses.parse(model="demo", input="Who?", text_format=Animal, max_output_tokens=300, temperature=0.0)
    assert isinstance(parsed.output_parsed, Animal)
    with api.responses.stream(model="demo", input="Who?", text_format=Animal, temperature=0.0) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Animal)


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_text_has_a_form(http: httpx.Client, form: str) -> None:
    shape: Any = {"type": form}
    if form == "json_schema":
        shape |= {"name": "animal", "schema": ANIMAL, "strict": True}
    found = post(http, text={"format": shape}, temperature=1.0, seed=3, max_output_tokens=400)
    checked(found)
    if found["status"] == "completed" and form == "json_schema":
        jsonschema.validate(json.loads(text_of(found)), ANIMAL)
    assert found["text"]["format"] == shape


def test_an_agent_continues_behind_its_calls(api: Any, http: httpx.Client) -> None:
    """By the previous response, by a reference, and by sending all of it again: the same prompt."""
    first = api.responses.create(
        model="demo",
        input=FIXED["input"],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        extra_body={"seed": 5},
    )
    call = first.output[0]
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), ANIMAL)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a bear"}
    sent: dict[str, Any] = {"model": "demo", "tools": TOOLS, "max_output_tokens": 5, "temperature": 0.0}
    start = {"role": "user", "content": [{"type": "input_text", "text": FIXED["input"]}]}
    answers = [
        api.responses.create(**sent, previous_response_id=first.id, input=[result]),
        api.responses.create(**sent, input=[start, call, result]),
        api.responses.create(**sent, input=[start, {"type": "item_reference", "id": call.id}, result]),
        api.responses.create(**sent, input=[start, {"id": call.id}, result], store=False),
    ]
    assert len({answer.usage.input_tokens for answer in answers if answer.usage}) == 1
    assert len({answer.output_text for answer in answers}) == 1
    page = api.responses.input_items.list(answers[0].id, order="asc")
    assert [item.type for item in page.data] == ["message", "function_call", "function_call_output"]
    raw = get(http, f"/responses/{answers[0].id}/input_items")
    checked(raw, ResponseItemList)
    assert [item["id"] for item in raw["data"]] == [item.id for item in reversed(page.data)]


def test_input_items_come_in_pages(http: httpx.Client) -> None:
    words = [{"role": "user", "content": f"word {number}"} for number in range(7)]
    made = post(http, input=words, max_output_tokens=1)
    found, after = list[str](), ""
    for _ in range(4):
        page = get(http, f"/responses/{made['id']}/input_items?order=asc&limit=2{after}")
        checked(page, ResponseItemList)
        found += [item["content"][0]["text"] for item in page["data"]]
        after = f"&after={page['last_id']}"
    assert found == [word["content"] for word in words]
    assert page["has_more"] is False
    get(http, f"/responses/{made['id']}/input_items?after=nobody", 400)
    get(http, f"/responses/{made['id']}/input_items?limit=0", 400)


def test_tokens_are_counted(http: httpx.Client) -> None:
    counted = post(http, "/responses/input_tokens", input=FIXED["input"])
    usage = post(http, max_output_tokens=1)["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_old_messages_are_left_out_to_fit(http: httpx.Client) -> None:
    words = [{"role": "user", "content": "a very long story about a bear " * 40} for _ in range(40)]
    refused = post(http, status=400, input=words)["error"]
    assert refused["code"] == "context_length_exceeded"
    found = post(http, input=words, truncation="auto", max_output_tokens=2)
    assert found["usage"]["input_tokens"] > 500


# ---- kept, in the background, streamed again


def test_the_background(http: httpx.Client, api: OpenAI) -> None:
    found = post(http, background=True, max_output_tokens=10)
    checked(found)
    assert found["status"] in ("queued", "in_progress")
    until(lambda: get(http, f"/responses/{found['id']}")["status"] == "incomplete", "the end")
    again = list(api.responses.retrieve(found["id"], stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == list(range(4, 4 + len(again)))


def test_one_in_the_background_is_cancelled(http: httpx.Client, api: OpenAI) -> None:
    found = api.responses.create(
        model="demo", input="Go on.", background=True, extra_body={"ignore_eos": True}, temperature=0.0
    )
    ended = api.responses.cancel(found.id)
    assert ended.status == "cancelled"
    assert api.responses.retrieve(found.id).status == "cancelled"
    assert api.responses.cancel(found.id).status == "cancelled"
    foreground = post(http, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(foreground["id"])


def test_a_deleted_response_is_gone(api: OpenAI) -> None:
    found = api.responses.create(**FIXED, max_output_tokens=1)
    api.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(found.id)
    with pytest.raises(openai.NotFoundError, match="previous response"):
        api.responses.create(**FIXED, previous_response_id=found.id)


def test_another_key_finds_nothing(server: Server, http: httpx.Client) -> None:
    found = post(http, max_output_tokens=4)
    running = post(http, background=True, ignore_eos=True)
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    with httpx.Client(base_url=server.url + "/v1", timeout=scaled(60), headers=headers) as other:
        for each in (found, running):
            path = f"/responses/{each['id']}"
            for suffix in ("", "/input_items", "?stream=true"):
                get(other, path + suffix, 404)
            post(other, path + "/cancel", 404)
            assert other.delete(path).status_code == 404
            post(other, status=404, previous_response_id=each["id"])
        item = found["output"][0]["id"]
        post(other, status=404, input=[{"type": "item_reference", "id": item}])
    assert http.delete(f"/responses/{running['id']}").json()["deleted"] is True


def test_connections_break_and_no_event_is_lost(http: httpx.Client) -> None:
    chance = random.Random(20)
    for number in range(12):
        broken_stream(http, FIXED, chance, is_background=number % 2 == 0)


@pytest.mark.parametrize("whose", ["vllm_lite.engine.process", "vllm_lite.worker.process"])
def test_a_stream_continues_when_a_process_is_killed(server: Server, http: httpx.Client, whose: str) -> None:
    fields = {"ignore_eos": True, "max_output_tokens": 400, "include": ["message.output_text.logprobs"]}
    plain = streamed(http, **fields)
    events = list[dict[str, Any]]()
    body = {**FIXED, **fields, "stream": True, "background": True}
    with http.stream("POST", "/responses", json=body) as answer:
        for event in events_in(answer.iter_lines()):
            events.append(event)
            if len(events) == 12:
                os.kill(children(server.process.pid)[whose], signal.SIGKILL)
                break
    path = f"/responses/{events[0]['response']['id']}?stream=true&starting_after={events[-1]['sequence_number']}"
    with http.stream("GET", path, timeout=scaled(60)) as answer:
        events += events_in(answer.iter_lines())
    found, expected = check_stream(events), plain[-1]["response"]
    assert text_of(found) == text_of(expected)
    assert found["usage"]["output_tokens"] == 400


def test_a_file_outlives_its_server(tmp_path: Path) -> None:
    """A response that had ended can be continued, and one that ran has failed."""
    flags = ["--served-model-name", "demo", "--responses-store", str(tmp_path / "store.db")]
    with serving(*flags) as server, httpx.Client(base_url=server.url + "/v1", timeout=scaled(60)) as http:
        first = streamed(http, max_output_tokens=4)[-1]["response"]
        running = post(http, background=True, ignore_eos=True, max_output_tokens=1500)
        for pid in (server.process.pid, *children(server.process.pid).values()):
            os.kill(pid, signal.SIGKILL)
        server.wait()
    with serving(*flags) as server, httpx.Client(base_url=server.url + "/v1", timeout=scaled(60)) as http:
        assert get(http, f"/responses/{first['id']}") == first
        with http.stream("GET", f"/responses/{first['id']}?stream=true") as answer:
            assert check_stream(list(events_in(answer.iter_lines()))) == first
        assert post(http, previous_response_id=first["id"], max_output_tokens=1)["previous_response_id"] == first["id"]
        failed = get(http, f"/responses/{running['id']}")
        checked(failed)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert oct((tmp_path / "store.db").stat().st_mode & 0o777) == "0o600"


def test_several_servers_share_a_file(tmp_path: Path) -> None:
    """Any of them knows a response, and ends it."""
    flags = ["--served-model-name", "demo", "--responses-store", str(tmp_path / "store.db"), "--api-server-count", "2"]
    with serving(*flags, light=True) as server:
        for _ in range(6):
            with httpx.Client(base_url=server.url + "/v1", timeout=scaled(60)) as http:
                made = post(http, background=True, ignore_eos=True)
            with httpx.Client(base_url=server.url + "/v1", timeout=scaled(60)) as http:
                assert get(http, f"/responses/{made['id']}")["status"] in ("queued", "in_progress")
                ended = post(http, f"/responses/{made['id']}/cancel")
                assert ended["status"] == "cancelled"


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [None]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": ["x"]}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": 3}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "poem"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "any": msgspec.json.decode(b"[" * 200 + b"]" * 200)}}}, "text.format"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"model": "another"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    status = 404 if param == "model" else 400
    error = post(http, status=status, **{**fields, "stream": stream})["error"]
    assert error["param"] == param, error


@pytest.mark.parametrize(
    "query", ["stream=true&starting_after=x", "stream=true&starting_after=99999", "starting_after=-1"]
)
def test_a_bad_place_is_refused(http: httpx.Client, query: str) -> None:
    found = post(http, background=True, max_output_tokens=1)
    until(lambda: get(http, f"/responses/{found['id']}")["status"] == "incomplete", "the end")
    assert get(http, f"/responses/{found['id']}?{query}", 400)["error"]["param"] == "starting_after"


PIECES: list[Any] = [None, True, -1, 0, 1e300, "", "x", [], {}, [[]], {"type": None}, {"type": "message"}, {"id": "x"}]
FIELDS = ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "truncation"]
FIELDS += ["previous_response_id", "store", "background", "stream_options", "max_output_tokens", "top_logprobs", "stop"]


def test_random_bodies_are_answered_or_refused(http: httpx.Client) -> None:
    chance = random.Random(7)

    def value(depth: int) -> Any:
        kind = chance.randrange(4 if depth else 1)
        if kind == 1:
            return [value(depth - 1) for _ in range(chance.randrange(3))]
        if kind == 2:
            names = [
                "type",
                "role",
                "content",
                "name",
                "id",
                "call_id",
                "output",
                "arguments",
                "format",
                "schema",
                "text",
            ]
            return {chance.choice(names): value(depth - 1) for _ in range(chance.randrange(4))}
        if kind == 3:
            return chance.choice(
                ["message", "user", "input_text", "function", "function_call", "json_schema", "reasoning"]
            )
        return chance.choice(PIECES)

    statuses = set()
    for _ in range(400):
        body = {**FIXED, "max_output_tokens": 1, **{chance.choice(FIELDS): value(4) for _ in range(2)}}
        answer = http.post("/responses", json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code == 200 and "text/event-stream" not in answer.headers["content-type"]:
            checked(answer.json())
    assert {200, 400} <= statuses


def test_a_waiting_response_counts_the_bytes_of_its_body() -> None:
    """Otherwise thousands of queued responses could hold bodies of any size. Ended responses no longer count."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 280_000}]}
    body: dict[str, Any] = {"model": "demo", "input": [thought, {"role": "user", "content": "Hi."}], "background": True}
    with serving(*SMALL_BODIES, light=True) as server, httpx.Client(base_url=server.url, timeout=scaled(60)) as http:
        assert http.post("/pause", params={"mode": "keep"}).status_code == 200
        repeated = body | {"input": "Hi.", "instructions": "x" * 280_000}  # by four events of the stream
        first, second = (http.post("/v1/responses", json=repeated) for _ in range(2))
        assert (first.status_code, second.status_code) == (200, 429)
        assert http.post(f"/v1/responses/{first.json()['id']}/cancel").json()["status"] == "cancelled"
        waiting = [http.post("/v1/responses", json=body) for _ in range(6)]
        assert [answer.status_code for answer in waiting] == [200] * 5 + [429]
        assert "requests that wait or run keep" in waiting[-1].json()["error"]["message"]
        small = http.post("/v1/responses", json=body | {"input": "Hi."})
        assert small.status_code == 200
        cancelled = http.post(f"/v1/responses/{waiting[0].json()['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        assert http.post("/v1/responses", json=body).status_code == 200


def test_a_request_counts_the_bytes_that_it_refers_to() -> None:
    """A conversation of more than a body may have is refused, in whatever way it is referred to."""
    parts = [{"type": "input_text", "text": "x" * 1000}] * 200
    with serving(*SMALL_BODIES, light=True) as server, httpx.Client(base_url=server.url, timeout=scaled(60)) as http:
        thought = {"type": "reasoning", "summary": [], "content": [{**part, "type": "text"} for part in parts]}
        body = {"model": "demo", "input": [thought, {"role": "user", "content": "Hi."}], "max_output_tokens": 2}
        first = http.post("/v1/responses", json=body).json()
        again = {"model": "demo", "input": "And?", "previous_response_id": first["id"], "max_output_tokens": 2}
        second = http.post("/v1/responses", json=again)
        assert second.status_code == 200, second.text
        (name,) = [item["id"] for item in _listed(http, first["id"]) if item["type"] == "reasoning"]
        twice = [{"type": "item_reference", "id": name}] * 2
        for more in (
            {"input": [*twice, {"role": "user", "content": "Hi."}]},
            {"input": body["input"], "previous_response_id": first["id"]},
        ):
            refused = http.post("/v1/responses", json={**again, "previous_response_id": None, **more})
            assert refused.status_code == 400, refused.text
            assert "the earlier responses that this request refers to" in refused.json()["error"]["message"]


def _listed(http: httpx.Client, response_id: str) -> list[Any]:
    found: list[Any] = http.get(f"/v1/responses/{response_id}/input_items").json()["data"]
    return found
