"""Running requests are described and forked over HTTP, waiting requests say why they wait, and admins have their
routes."""

import asyncio
import json
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.deadlines import scaled
from tests.http_server import Server, serving, short_socket, until
from vllm_lite.client.engines.session import Session

USER, ADMIN = {"Authorization": "Bearer a-user"}, {"Authorization": "Bearer an-admin"}
HEADERS = USER
NUM_BLOCKS = 128
LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DEADLINE_S = scaled(30.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A slow server, so that tests can look at requests while they run."""
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        flags = ["--address", short_socket(Path(folder)), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        flags += ["--dtype", "float32", "--max-num-queued-tokens", "1500", "--max-num-seqs", "8"]
        flags += ["--attention-backend", "reference", "--enforce-eager"]
        with serving(*flags, "--api-key", "a-user", "--api-key", "b-user", "--admin-api-key", "an-admin") as server:
            yield server


def message_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


# ---- admission


async def test_a_waiting_request_has_a_reason(server: Server) -> None:
    """A prompt of 63 blocks runs and grows; one of 69 does not fit beside it. A third one would be too many tokens."""

    async with httpx.AsyncClient(base_url=server.url, headers=USER, timeout=DEADLINE_S) as http:
        first = {"prompt": [5] * 1000, "max_tokens": 900, "request_id": "first", "stream": True, **LONG}
        async with http.stream("POST", "/v1/completions", json=first) as running:
            lines = running.aiter_lines()
            await anext(lines)
            late = {"prompt": [6] * 1100, "max_tokens": 2, "request_id": "late", "priority": 3, **LONG}
            waiting = asyncio.ensure_future(http.post("/v1/completions", json=late))
            while (answer := await http.get("/v1/requests/cmpl-late")).status_code == 404:
                assert not waiting.done()
            found: dict[str, Any] = answer.json()
            third = {"prompt": [7] * 600, "max_tokens": 2}
            refused = await http.post("/v1/completions", json=third)
            assert not waiting.done()
        assert "1100 tokens are waiting, and 600 more" in message_of(refused, 429)
        assert refused.headers["retry-after"] == "1"
        served = await waiting
        assert served.json()["usage"]["completion_tokens"] == 2
        assert (await http.get("/v1/requests/cmpl-late")).status_code == 404
        assert (await http.post("/v1/completions", json=third)).status_code == 200
    assert (found["id"], found["state"]) == ("cmpl-late", "waiting")
    admission, blocks = found["admission"], found["admission"]["blocks"]
    assert (admission["verdict"], admission["reason"]) == ("LATER", "waits_for_blocks")
    assert (blocks["required"], blocks["watermark"], blocks["total"]) == (69, 1, NUM_BLOCKS - 1)
    assert blocks["free"] <= NUM_BLOCKS - 1 - 63
    assert f"needs 69 KV blocks and {blocks['free']} of 127 are free" in admission["why"]
    (prompt,) = found["prompts"]
    assert (prompt["prompt_tokens"], prompt["completion_tokens"], prompt["priority"]) == (1100, 0, 3)
    assert prompt["age_s"] > 0
    (sample,) = prompt["samples"]
    assert (sample["state"], sample["place_in_queue"], sample["blocks"]) == ("waiting", 0, 0)


@pytest.mark.parametrize(
    ("body", "number"), [({"prompt": [5] * 2020}, 2020), ({"prompt": [5] * 1500, "max_tokens": 2030}, 2030)]
)
def test_never_is_said_at_once(http: httpx.Client, body: dict[str, Any], number: int) -> None:
    """The context has 2048 tokens; the pool has room for 2016 without its watermark."""
    message = message_of(http.post("/v1/completions", json=body), 400)
    assert "2016" in message
    assert str(number) in message


def test_output_ends_where_the_pool_does(http: httpx.Client) -> None:
    body = {"prompt": [5] * 2000, "max_tokens": 600, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


def test_the_requests_of_one_key_are_nothing_to_another(http: httpx.Client) -> None:
    other = {"Authorization": "Bearer b-user"}
    body = {"prompt": "Once", "max_tokens": 1500, "stream": True, "request_id": "private", **LONG}
    path = "/v1/requests/cmpl-private"
    with http.stream("POST", "/v1/completions", json=body) as answer:
        pieces = chunks(answer)
        next(pieces)
        refused = [
            http.get(path, headers=other),
            http.delete(path, headers=other),
            http.post(f"{path}/fork", headers=other, json={"max_tokens": 3}),
        ]
        assert [message_of(each, 404) for each in refused] == ["no request 'cmpl-private' is running"] * 3
        assert http.post("/abort_requests", headers=other, json={"request_ids": ["private"]}).status_code == 200
        assert http.get(path).json()["state"] == "running"
        assert http.get(path, headers=ADMIN).json()["state"] == "running"
        ended = http.delete(path, headers=ADMIN)
        assert ended.status_code == 200, ended.text


def test_the_state_of_one_that_runs(http: httpx.Client) -> None:
    body = {"prompt": [[5] * 40, [6] * 40], "n": 2, "max_tokens": 300, "stream": True, "deadline_ms": 60_000, **LONG}
    with http.stream("POST", "/v1/completions", json={**body, "request_id": "pair"}) as answer:
        pieces = chunks(answer)
        while {next(pieces)["choices"][0]["index"]} != {3}:  # by then the second prompt has its samples
            pass
        found = http.get("/v1/requests/cmpl-pair").json()
    assert found["state"] == "running"
    assert found["admission"]["verdict"] == "OK"
    assert found["usage"]["prompt_tokens"] == 80
    assert len(found["prompts"]) == 2
    for prompt in found["prompts"]:
        assert 0 < prompt["deadline_in_s"] <= 60
        assert [sample["index"] for sample in prompt["samples"]] == [0, 1]
        assert all(sample["blocks"] >= 3 and sample["computed_tokens"] >= 40 for sample in prompt["samples"])


# ---- forks


def test_greedy_forks_of_a_chat_continue_like_it(server: Server, http: httpx.Client, session: Session) -> None:
    """The prompt of more than 30 blocks is there once: with four of it they would not fit."""
    api = OpenAI(base_url=server.url + "/v1", api_key="a-user", max_retries=0)
    before = session.stats()
    stream = api.chat.completions.create(
        model="demo_model",
        messages=[{"role": "user", "content": "Tell me a story. " * 80}],
        max_tokens=300,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "request_id": "trunk"},
    )
    with stream:
        pieces = [next(stream) for _ in range(3)]
        answer = http.post("/v1/requests/chatcmpl-trunk/fork", json={"n": 3})
        assert answer.status_code == 200, answer.text
        pieces += list(stream)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    told, usage = answer.json(), pieces[-1].usage
    assert told["object"] == "chat.completion"
    assert told["id"].startswith("chatcmpl-")
    assert told["id"] != "chatcmpl-trunk"
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in told["choices"]] == [text] * 3
    assert [choice["finish_reason"] for choice in told["choices"]] == ["length"] * 3
    assert usage is not None
    assert told["usage"]["prompt_tokens"] == usage.prompt_tokens > 30 * 16
    assert told["usage"]["completion_tokens"] == 3 * 300
    after = session.stats()
    assert 4 * (usage.prompt_tokens + 300) > NUM_BLOCKS * 16
    assert after.copied_blocks > before.copied_blocks
    assert after.preemptions == before.preemptions
    assert after.num_used_blocks == 0


def test_forks_of_a_completion_in_a_stream(http: httpx.Client, session: Session) -> None:
    """Each fork has another seed and continues differently; every choice begins with the output of the forked
    request."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 300,
        "stream": True,
        "echo": True,
        "request_id": "trunk",
        **LONG,
    }
    with http.stream("POST", "/v1/completions", json={**body, "echo": True}) as trunk:
        pieces = chunks(trunk)
        head = "".join(next(pieces)["choices"][0]["text"] for _ in range(4))
        asked = {"n": 2, "temperature": 1.5, "seed": 7, "max_tokens": 550, "stream": True, "request_id": "twigs"}
        asked |= {"stream_options": {"include_usage": True}}
        with http.stream("POST", "/v1/requests/cmpl-trunk/fork", json=asked) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = list(chunks(answer))
        whole = head + "".join(piece["choices"][0]["text"] for piece in pieces)
    assert {chunk["id"] for chunk in found} == {"cmpl-twigs"}
    assert found[-1]["usage"]["completion_tokens"] == 2 * 550
    texts = ["", ""]
    for chunk in found[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert all(text.startswith(head) for text in texts)
    assert len({texts[0], texts[1], whole[: len(texts[0])]}) == 3
    until(lambda: session.stats().num_used_blocks == 0, "the end of all branches")


def test_forks_of_token_ids(http: httpx.Client) -> None:
    params = {"max_tokens": 600, **LONG}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "stream": True, "request_id": "ids"}
    with http.stream("POST", "/inference/v1/generate", json=body) as trunk:
        pieces = chunks(trunk)
        ids = next(pieces)["choices"][0]["token_ids"]
        told = http.post("/v1/requests/gen-ids/fork", json={"n": 2, "max_tokens": 550}).json()
        ids += [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert [choice["token_ids"] for choice in told["choices"]] == [ids[:550]] * 2


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"n": 0}, 400, "n must be between 1 and"),
        ({"n": 100_000}, 400, "n must be between 1 and"),
        ({"max_tokens": 1}, 400, "max_tokens counts the"),
        ({"max_tokens": 2049}, 400, "maximum context length is 2016 tokens, but you requested 2049 output"),
        ({"use_beam_search": True}, 400, "no beams"),
        ({"temperature": -1}, 400, "temperature"),
        ({"guided_json": {"a": 1}}, 400, "guided_json"),
        ({"request_id": None}, 409, "in use"),
    ],
)
def test_forks_that_make_no_sense(http: httpx.Client, asked: dict[str, Any], status: int, says: str) -> None:
    trunk_id = str(uuid.uuid4())  # the one before is in use until the server has seen that its client left
    asked = {key: trunk_id if key == "request_id" else value for key, value in asked.items()}
    body = {"prompt": "Once", "max_tokens": 1900, "stream": True, "request_id": trunk_id, **LONG}
    with http.stream("POST", "/v1/completions", json=body) as trunk:
        assert trunk.status_code == 200, trunk.read()
        pieces = chunks(trunk)
        for _ in range(2):
            next(pieces)
        assert says in message_of(http.post(f"/v1/requests/cmpl-{trunk_id}/fork", json=asked), status)


@pytest.mark.parametrize(
    ("more", "says"), [({"n": 2}, "one sample"), ({"prompt": ["Once", "Twice"]}, "has 2 prompts; only one")]
)
def test_requests_that_cannot_be_forked(http: httpx.Client, session: Session, more: dict[str, Any], says: str) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "request_id": "many", **LONG, **more}
    with http.stream("POST", "/v1/completions", json=body) as trunk:
        pieces = chunks(trunk)
        next(pieces)
        assert says in message_of(http.post("/v1/requests/cmpl-many/fork", json={}), 400)
    until(lambda: session.stats().num_used_blocks == 0, "its end")
    assert "no request 'cmpl-many' is running" in message_of(http.post("/v1/requests/cmpl-many/fork", json={}), 404)


# ---- admins


def test_a_reset_forgets_and_only_admins_may(server: Server, http: httpx.Client) -> None:
    body = {"prompt": [9] * 200, "max_tokens": 2}

    def cached() -> int:
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() == 192
    assert "an admin key" in message_of(http.post("/reset_prefix_cache"), 403)
    assert message_of(httpx.post(server.url + "/reset_prefix_cache"), 401)
    assert cached() == 192
    done = http.post("/reset_prefix_cache", headers=ADMIN)
    assert done.status_code == 200
    assert done.json()["num_blocks"] >= 12
    assert cached() == 0
    assert cached() == 192
    assert http.get("/v1/models", headers=ADMIN).status_code == 200  # it opens everything


def test_a_reset_does_not_change_running_requests(http: httpx.Client) -> None:
    body = {"prompt": [8] * 100, "max_tokens": 120, "return_token_ids": True, **LONG}
    expected = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        pieces = chunks(answer)
        ids = next(pieces)["choices"][0]["token_ids"]
        assert http.post("/reset_prefix_cache", headers=ADMIN).json()["num_live"] == 1
        ids += [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert ids == expected
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
