"""HTTP as bytes: invalid HTTP, limits of size and time for its parts, and several requests on one connection."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.deadlines import scaled
from tests.e2e.raw_server import (
    CHUNKED,
    FLOOD_BYTES,
    FLOOD_MEMORY_BYTES,
    JSON,
    KEY,
    LONG,
    MAX_BYTES,
    connected,
    error_of,
    exchange,
    raw_server,
    until_closed,
)
from tests.http_server import Server, until
from vllm_lite.client.engines.session import Session

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with raw_server() as server:
        yield server


@pytest.mark.parametrize("data", [b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_invalid_http_is_refused(server: Server, data: bytes) -> None:
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"message":' in answer


@pytest.mark.parametrize("header", [b"X-Long: " + b"x" * 1_000_000, b"X: y\r\n" * 100_000, b"X: y\r\n" * 12_000])
def test_headers_have_a_size(server: Server, header: bytes) -> None:
    assert exchange(server, b"GET /health HTTP/1.1\r\n" + header + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("rest", [b"X: y\r\n" * 100_000, b"X: " + b"y" * 1_000_000])
def test_trailers_have_a_size(server: Server, rest: bytes) -> None:
    assert exchange(server, CHUNKED + b"0\r\n" + rest).startswith(b"HTTP/1.1 431 ")


def test_the_description_of_a_chunk_has_a_size(server: Server) -> None:
    assert exchange(server, CHUNKED + b"1;" + b"x" * 1_000_000).startswith(b"HTTP/1.1 431 ")


def test_small_chunks_make_a_body(server: Server) -> None:
    """All that describes them is longer than headers may be."""
    body = b'{"prompt": "x"}'.rjust(90_000)
    data = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    data += b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nX: y\r\n\r\n"
    assert exchange(server, data).startswith(b"HTTP/1.1 200 ")


def test_a_trailer_is_no_header(server: Server) -> None:
    data = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"2\r\n{}\r\n0\r\nAuthorization: Bearer %b\r\n\r\n" % KEY.encode()
    assert exchange(server, data).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("rest", [b"", b"Content-Length: 9\r\n\r\n1234567"])
def test_requests_without_end_take_little_memory(server: Server, rest: bytes) -> None:
    """A client without a key sends as many requests as the server reads, and reads no answer."""
    process = psutil.Process(server.process.pid)
    with connected(server) as connection:
        before = process.memory_info().rss
        flood, sent = b"POST / HTTP/1.1\r\n" + rest + b"\r\n", 0
        data = memoryview(flood * (FLOOD_BYTES // len(flood)))
        connection.settimeout(1.0)
        try:
            while sent < len(data):
                sent += connection.send(data[sent : sent + 65536])
        except TimeoutError:
            pass  # it is not read any more, which is as well
        assert sent > 200_000
        assert httpx.get(server.url + "/health", timeout=scaled(30.0)).status_code == 200
        assert process.memory_info().rss - before < FLOOD_MEMORY_BYTES


def test_a_client_behind_two_requests_is_missed(server: Server, session: Session) -> None:
    body = json.dumps({**LONG, "n": 4}).encode()
    length = b"Content-Length: %d" % len(body)
    head = CHUNKED.replace(b"/tokenize", b"/v1/completions").replace(b"Transfer-Encoding: chunked", length)
    before = session.stats().generated_tokens
    with connected(server) as connection:
        connection.sendall(head + body)
        until(lambda: session.stats().generated_tokens > before, "its first token")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    until(lambda: session.stats().num_used_blocks == 0, "the end of what was abandoned")
    assert session.stats().generated_tokens - before < 4 * LONG["max_tokens"]
    assert "Traceback" not in server.output


LATE: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "a part of the first line": (b"", b"GET /health HT"),
    "headers without their end": (b"", b"GET /health HTTP/1.1\r\nX: y\r\n"),
    "a part of a body": (b"", CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 10") + b'{"pro'),
    "a blank line behind an answer": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"),
    "a body behind an answer": (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"x"),
}
"""A complete request, which is answered at once, if there is one; then the bytes of one that never ends. Bytes after
an answer are neither headers that somebody waits for, nor a body."""


def test_requests_that_never_end_have_a_time(server: Server) -> None:
    """Side by side, as each waits until its time is over."""
    with ExitStack() as stack:
        connections = {name: stack.enter_context(connected(server)) for name in LATE}
        for name, (whole, rest) in LATE.items():
            if whole:
                connections[name].sendall(whole)
                assert connections[name].recv(65536).startswith(b"HTTP/1.1 200 "), name
            connections[name].sendall(rest)
        for name, (whole, _) in LATE.items():
            said = until_closed(connections[name])
            assert whole or said.startswith(b"HTTP/1.1 408 "), (name, said)


def test_a_body_has_a_size(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * (MAX_BYTES // 20)

    for content in (b" " * (MAX_BYTES + 1), chunks()):
        error_of(http.post("/v1/completions", content=content, headers=JSON), 413)
    inside = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert http.post("/v1/completions", content=inside.ljust(MAX_BYTES), headers=JSON).status_code == 200


@pytest.mark.parametrize("rest", [b"zz\r\n", b"5\r\n{}\r\n\r\n\r\nzz", b"3\r\n{} \r\nx\r\n"])
def test_a_broken_body_behind_a_request_is_answered_behind_it(server: Server, rest: bytes) -> None:
    """The answer comes at once, not after the timeout."""
    first = json.dumps({**LONG, "max_tokens": 8}).encode()
    length = b"Content-Length: %d" % len(first)
    head = CHUNKED.replace(b"/tokenize", b"/v1/completions").replace(b"Transfer-Encoding: chunked", length)
    answer = exchange(server, head + first + CHUNKED + rest)
    assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"200", b"400"]
    assert answer.count(b"connection: close") == 1
    error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
    assert "HTTP" in error["message"]
