"""Clients that speak HTTP in ways of their own to a server without keys: Java, old proxies, PowerShell, browsers."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deadlines import scaled
from tests.http_server import Server, serving

HEAD = b"POST %b HTTP/1.%b\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OFFER = b"Connection: %bUpgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def exchange(server: Server, data: bytes) -> bytes:
    """Send `data` and read until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=scaled(20)) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_stream_to_a_client_of_http_1_0_is_not_chunked(server: Server) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 4, "stream": True}).encode()
    data = HEAD % (b"/v1/completions", b"0") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    head, _, events = exchange(server, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_an_offer_of_http_2_is_answered_in_http_1_1(server: Server) -> None:
    """Java's HttpClient sends this offer with every request of a connection, until a server accepts it."""
    chunked = b'Transfer-Encoding: chunked\r\n\r\nf\r\n{"prompt": "x"}\r\n0\r\n\r\n'
    first, last = (HEAD % (b"/tokenize", b"1") + OFFER % more + chunked for more in (b"", b"close, "))
    assert exchange(server, first + first + last).count(b'{"count":') == 3


# ---- bodies


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 2, "temperature": 0}
NULL = {"role": "tool", "content": None, "tool_call_id": "a"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
}
ITEMS = [
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": None},
]
BLOCKS = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": None}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hé", "max_output_tokens": 2},
    "/api/chat": {**CHAT, "stream": False},
    "/v1/completions": {"prompt": "Hé", "max_tokens": 2},
    "/invocations": {"prompt": "Hé", "max_tokens": 2},
    "/tokenize": {"prompt": "Hé"},
}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_of_powershell_are_read(http: httpx.Client, path: str) -> None:
    """Bytes as version 5 makes them by `Set-Content -Encoding UTF8`, `Out-File` and `[Text.Encoding]::Unicode`."""
    text = json.dumps(BODIES[path], ensure_ascii=False)
    for data in (b"\xef\xbb\xbf" + text.encode(), b"\xff\xfe" + text.encode("utf-16-le"), text.encode("utf-16-le")):
        answer = http.post(path, content=data, headers={"Content-Type": "application/json; charset=utf-16"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
def test_half_of_a_surrogate_pair_does_not_end_a_session(http: httpx.Client, path: str) -> None:
    data = json.dumps(BODIES[path]).replace(r"\u00e9", r"\ud83d")
    assert r"\ud83d" in data
    answer = http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [*CHAT["messages"], CALLED, NULL]}),
        ("/v1/chat/completions", {"messages": [*CHAT["messages"], {"role": "function", "name": "f", "content": None}]}),
        ("/v1/messages", {"messages": [*CHAT["messages"], *BLOCKS]}),
        ("/v1/responses", {"input": ITEMS}),
        ("/api/chat", {"messages": [*CHAT["messages"], {"role": "tool", "content": None, "tool_name": "f"}]}),
    ],
)
def test_a_tool_may_answer_nothing(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    answer = http.post(path, json={**BODIES[path], **more})
    assert answer.status_code == 200, answer.text


# ---- browsers


FORMS = {
    "/v1/chat/completions": lambda error: error["error"]["message"],
    "/v1/messages": lambda error: error["error"]["message"],
    "/v1/responses": lambda error: error["error"]["message"],
    "/api/chat": lambda error: error["error"],
}
REBOUND = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"}
CROSS = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.mark.parametrize(("headers", "flag"), [(REBOUND, "--allowed-hosts"), (CROSS, "--allowed-origins")])
def test_a_page_of_a_stranger_is_refused_everywhere(http: httpx.Client, headers: dict[str, str], flag: str) -> None:
    """Also under a name that resolves to this machine. Errors have the format of the route's API."""
    for path, message in FORMS.items():
        answer = http.post(path, json=BODIES[path], headers=headers)
        assert answer.status_code == 403
        assert f"start it with {flag} " in message(answer.json())
    for path in ("/", "/v1/models", "/models", "/health", "/metrics", "/api/tags", "/server_info", "/none"):
        assert http.get(path, headers=headers).status_code == 403
    assert http.post("/pause", headers=headers).status_code == 403
    assert http.get("/health").status_code == 200


def test_pages_of_this_machine_and_programs_may_call(http: httpx.Client) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, is_open in (
        ("http://localhost:3000", True),
        ("app://obsidian.md", True),
        ("https://evil.example", False),
    ):
        answer = http.options("/v1/chat/completions", headers={"Origin": origin, **asked})
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (
            200 if is_open else 400,
            is_open,
        )
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin})
        assert answer.status_code == (200 if is_open else 403)
        assert answer.headers.get("access-control-allow-origin") == (origin if is_open else None)
    assert http.post("/pause", headers={"Origin": "http://localhost:3000"}).status_code == 403
