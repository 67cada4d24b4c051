"""Connections with limits: headers have a size and a time, and errors in them are OpenAI's.

uvicorn bounds neither: without this a client could send headers without end, or never end them.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vllm_lite.server.errors import error_body

MAX_HEADER_BYTES = 64 * 1024
ABORT = "vllm_lite.abort"
"""In a request's `extensions`: ends its connection at once, whatever was not sent yet."""


class _HeadersTooLong(Exception):
    pass


class Connection(HttpToolsProtocol):
    """See the module. `limited` gives it its time."""

    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True  # from the very start: a client that says nothing is slow as well
        self._is_new = False  # the message began in the middle of what is being read, which may be long
        self._timer: asyncio.TimerHandle | None = None
        self._error = (400, "what was sent is not HTTP")

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_new = False
        super().data_received(data)
        if self._in_headers and not self._is_new and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}
        self._in_headers = self._is_new = True
        self._header_bytes = 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._error = _TOO_LONG
            raise _HeadersTooLong  # to data_received of the base, which answers
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base's words, which are not JSON
        """Whatever is wrong before there is a request."""
        status, message = self._error
        body = error_body(status, message)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _refuse_headers(self) -> None:
        self._error = _TOO_LONG
        self.send_400_response("")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            return
        self._error = (408, f"the headers of a request must come within {self.header_timeout_s:g} s")
        self.send_400_response("")


_TOO_LONG = (431, f"the headers of a request may have at most {MAX_HEADER_BYTES} bytes")


def limited(timeout_s: float) -> type[Connection]:
    """A Connection whose headers have `timeout_s`."""
    return type("LimitedConnection", (Connection,), {"header_timeout_s": timeout_s})
