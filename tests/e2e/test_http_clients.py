"""Clients that speak HTTP in ways of their own to a server without keys: Java, old proxies, PowerShell, browsers."""

import json
import socket
from collections.abc import Iterator

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
    """As Java's HttpClient makes it with every request of a connection, until a server takes it."""
    chunked = b'Transfer-Encoding: chunked\r\n\r\nf\r\n{"prompt": "x"}\r\n0\r\n\r\n'
    first, last = (HEAD % (b"/tokenize", b"1") + OFFER % more + chunked for more in (b"", b"close, "))
    assert exchange(server, first + first + last).count(b'{"count":') == 3
