"""A server with keys and tight limits, for tests that need raw HTTP."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import patience, scaled
from tests.http_server import Server, serving, short_socket

KEY = "a-key-of-the-tests"
OTHER_KEY = "a-key-in-a-file"
PROMPT = "Once upon a time"
JSON = {"Content-Type": "application/json"}
LONG: Any = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
MAX_BYTES = 100_000
SLOW_S = 1.0
FLOOD_BYTES, FLOOD_MEMORY_BYTES = 3_000_000, 20_000_000
"""Bytes that a test sends, and the memory that the server may take for them. Each request takes 3 kB of objects, and
its answer has 300 bytes."""
CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" % KEY.encode()
)


@contextmanager
def raw_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"# keys\n{OTHER_KEY}\n")
        flags = ["--address", short_socket(Path(folder)), "--api-key-file", str(keys), "--max-num-seqs", "4"]
        slow_s = str(patience(SLOW_S))
        limits = ["--max-num-queued-reqs", "2", "--max-request-bytes", str(MAX_BYTES), "--header-timeout-s", slow_s]
        flags += ["--body-timeout-s", slow_s, "--allowed-origins", "https://example.org"]
        with serving(*flags, *limits, env={"VLLM_LITE_API_KEY": KEY}) as server:
            yield server


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error, which has OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("Error")
    assert error["code"] == status
    assert "Traceback" not in answer.text
    assert "/vllm_lite" not in answer.text
    return error


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=scaled(20))


def exchange(server: Server, data: bytes) -> bytes:
    """Send `data` and read until the server closes the connection."""
    with connected(server) as connection:
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it answered already
        return until_closed(connection)


def until_closed(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except ConnectionResetError:
        pass
    return answer
