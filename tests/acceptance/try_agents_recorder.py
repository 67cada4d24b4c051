"""A proxy between an agent and the server that records requests and answers."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 300.0
_OWN = ("connection", "transfer-encoding", "content-length", "host", "keep-alive")
"""Headers about the transfer of a body, which the proxy writes itself."""


class Exchange(NamedTuple):
    """One request and its answer. `warning` is the header of the answer, `body` that of the request."""

    method: str
    path: str
    status: int
    warning: str
    body: bytes
    answer: bytes


class _Handler(BaseHTTPRequestHandler):
    """Passes requests on and answers back, piece by piece."""

    protocol_version = "HTTP/1.1"
    target = ""
    exchanges: ClassVar[list[Exchange]]

    def log_message(self, *_: object) -> None:
        """Print nothing, because the exchanges are recorded."""

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        self._relay(self.rfile.read(size))

    def do_GET(self) -> None:
        self._relay(b"")

    def do_HEAD(self) -> None:
        self._relay(b"")

    def _relay(self, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
        there = http.client.HTTPConnection(self.target, timeout=TIMEOUT_S)
        self.close_connection = True
        try:
            there.request(self.command, self.path, body or None, headers)
            self._answer(there.getresponse(), body)
        except ConnectionError:
            pass  # the agent has gone
        finally:
            there.close()

    def _answer(self, answer: http.client.HTTPResponse, body: bytes) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OWN:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        found = bytearray()
        while piece := answer.read1(65536):
            found += piece
            self.wfile.write(piece)
        warning = answer.getheader("warning") or ""
        self.exchanges.append(Exchange(self.command, self.path, answer.status, warning, body, bytes(found)))


class Recorder:
    """The proxy at `url`. `exchanges`: recorded exchanges, in the order of their ends."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[Exchange] = []
        mine = {"target": urlsplit(upstream).netloc, "exchanges": self.exchanges}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), mine))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> "Iterator[Recorder]":
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def write(self, folder: Path) -> None:
        """Write each exchange to a file of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, each in enumerate(self.exchanges):
            head = f"{each.method} {each.path} {each.status} {each.warning}\n".encode()
            (folder / f"{number:03}").write_bytes(head + each.body + b"\n\n" + each.answer)
