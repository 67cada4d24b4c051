"""Hostile or merely large input to a running server: it continues to serve, and refuses input beyond its limits."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.http_server import READY_S, Server, client, serving, until

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
TEMPLATE = """{% if messages[0].role == 'tool' %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% endif %}<|bos|>{{ messages[0].content }}"""
MIB = 1 << 20


def chat(role: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "Once upon a time"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(template=TEMPLATE, light=True) as server:
        yield server


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_hostile_template_does_not_block_other_requests(server: Server, pool: ThreadPoolExecutor) -> None:
    with client(server, trust_env=False) as http:
        bad = pool.submit(http.post, "/v1/chat/completions", json=chat("tool"), timeout=READY_S)
        answers = 0
        while not bad.done():
            assert http.get("/health").status_code == 200
            answers += 1
        assert answers > 1
        error = bad.result().json()["error"]
        assert bad.result().status_code == 400
        assert "a rendering may take 1 s of processor time and 512 MiB of memory" in error["message"]
        assert http.post("/v1/chat/completions", json=chat("user")).status_code == 200


def test_a_hostile_template_does_not_keep_the_server_from_ending(pool: ThreadPoolExecutor) -> None:
    with serving(template=TEMPLATE, light=True) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        with client(server) as http:
            bad = [pool.submit(http.post, "/v1/chat/completions", json=chat("tool"), timeout=READY_S) for _ in range(4)]
            until(lambda: http.get("/health").status_code == 200, "an answer")
            assert server.stop() == 0
            for answer in bad:
                assert answer.result(READY_S).status_code in (400, 503)
        assert psutil.wait_procs(family, timeout=READY_S)[1] == []


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_text_that_is_far_too_long_is_refused_unread(server: Server, route: str) -> None:
    text = "a cat sat on a mat. " * (MIB // 8)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in route else {"prompt": text}
    with client(server) as http:
        answer = http.post(route, json={**body, **({} if route == "/tokenize" else {"max_tokens": 1})})
        cut = http.post(route, json={**body, "truncate_prompt_tokens": 5, "max_tokens": 1})
    assert (answer.status_code, cut.status_code) == (400, 400)
    error = answer.json()["error"]
    assert error["param"] == ("messages" if "chat" in route else "prompt")
    if route != "/tokenize":  # where there is no context to exceed
        assert error["code"] == "context_length_exceeded"
        assert re.search(
            r"context length is 2048 tokens, .* requested 1 output .* at least 81\d{3} in", error["message"]
        )
    assert "at most 524288 are tokenized" in (cut if error["code"] != 400 else answer).json()["error"]["message"]


def test_bodies_that_are_never_whole_take_a_bounded_sum(server: Server) -> None:
    """Twelve clients send 4 MB each; the server's memory may grow by six bodies and a few copies."""
    host, port = server.url.removeprefix("http://").split(":")
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    head = b"POST /tokenize HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: 4100000\r\n\r\n"
    connections = []

    def send() -> None:
        connection = socket.create_connection((host, int(port)), timeout=READY_S)
        connections.append(connection)
        with suppress(OSError):  # one that is refused
            connection.sendall(head + b'{"prompt":"' + b"x" * 4_000_000)

    def is_full() -> bool:
        send()
        answer = http.post("/tokenize", json={"prompt": "x" * 3_000_000})
        return answer.status_code == 429 and answer.headers["retry-after"] == "1"

    try:
        for _ in range(12):
            send()
        with client(server) as http:
            until(is_full, "a refusal", READY_S)
            until(lambda: process.memory_info().rss - before < 50 * MIB, "the end of what was refused", READY_S)
            assert http.post("/tokenize", json={"prompt": "x" * 60_000}).status_code == 200
    finally:
        for connection in connections:
            connection.close()
    with client(server) as http:
        body = {"prompt": "x" * 500_000}
        until(lambda: http.post("/tokenize", json=body).status_code == 200, "what is held no longer", READY_S)


@pytest.mark.parametrize("num_objects", [49_000, 260_000])
def test_costly_bodies_take_a_bounded_sum(server: Server, pool: ThreadPoolExecutor, num_objects: int) -> None:
    """Sixteen bodies of a few hundred kilobytes, each of many small objects, were 400 MB once they were decoded."""
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    function = {"name": "f", "parameters": {"type": "object", "examples": [{"a": 0}] * num_objects}}
    body = json.dumps({**chat("user"), "tools": [{"type": "function", "function": function}], "tool_choice": "none"})
    headers = {"Content-Type": "application/json"}
    with client(server) as http:
        assert http.post("/v1/chat/completions", json=chat("user")).status_code == 200

        def ask() -> int:
            return http.post("/v1/chat/completions", content=body, headers=headers).status_code

        before = most = sum(each.memory_info().rss for each in family)
        answers = [pool.submit(ask) for _ in range(16)]
        while not all(answer.done() for answer in answers):
            most = max(most, sum(each.memory_info().rss for each in family))
        statuses = {answer.result() for answer in answers}
    assert statuses <= {413 if num_objects > 100_000 else 200, 429}
    assert most - before < 95 * MIB


def test_requests_that_have_not_begun_at_the_end_are_refused(pool: ThreadPoolExecutor) -> None:
    with serving("--max-num-seqs", "1", "--shutdown-timeout", "0", light=True) as server, client(server) as http:

        def ask(stream: bool) -> httpx.Response:
            return http.post("/v1/completions", json={**LONG, "stream": stream}, timeout=READY_S)

        first: Future[httpx.Response] = pool.submit(ask, False)
        until(lambda: "vllm:num_requests_running{" in http.get("/metrics").text, "metrics")
        until(lambda: http.get("/load").json()["server_load"] == 1, "the first")
        until(lambda: _running(http) == 1, "its step")
        rest = [pool.submit(ask, place % 2 == 0) for place in range(6)]
        until(lambda: http.get("/load").json()["server_load"] == 7, "all")
        server.process.send_signal(signal.SIGTERM)
        begun = first.result(READY_S)
        assert begun.status_code == 200
        assert begun.json()["choices"][0]["finish_reason"] in ("abort", "length")
        statuses = [answer.result(READY_S).status_code for answer in rest]
        assert server.wait() == 0
    assert statuses.count(503) >= 4, statuses
    assert set(statuses) <= {200, 503}
    for answer in rest:
        if answer.result().status_code == 503:
            assert answer.result().json()["error"]["message"].startswith("the server is shutting down")
        else:
            assert answer.result().content.count(b'"text":""') == 0 or b'"length"' in answer.result().content


def _running(http: httpx.Client) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
