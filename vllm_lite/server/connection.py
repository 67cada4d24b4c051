"""Connections with limits: headers have a size and a time, and errors in them are OpenAI's.

uvicorn bounds neither: without this a client could send headers without end, or never end them. Nor does it tell a
request that its client has gone once another one has come behind it on the same connection.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from vllm_lite.server.errors import error_body

MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 16
"""Requests that may wait behind the one that is answered. With more the client is not read, nor missed if it goes."""
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
        """Since the message began, or since the last of its body: headers, trailers, what describes chunks."""
        self._in_headers = True  # from the very start: a client that says nothing is slow as well
        self._is_new = False  # the message began, or body came, in the middle of what is being read, which may be long
        self._timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        self._error = (400, "what was sent is not HTTP")

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.pipeline.clear()
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_new = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_new:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse_headers()
                return
        if self._timer is None and self._is_idle():  # the base's own timer ended with the first byte
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}
        self._in_headers = self._is_new = True
        self._header_bytes = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are nobody's headers: whoever let the headers pass has not seen them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._error = _TOO_LONG
            raise _HeadersTooLong  # to data_received of the base, which answers
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # it is how the end of the client is seen

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        self._is_new = True
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

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

    def _is_idle(self) -> bool:
        """All that was asked has been answered, and nothing new."""
        return self.cycle is not None and self.cycle.response_complete

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self._is_idle():
            self._start_timer()  # once it is answered there is time again
            return
        if not self._in_headers:
            self.transport.close()
            return
        self._error = (408, f"the headers of a request must come within {self.header_timeout_s:g} s")
        self.send_400_response("")


_TOO_LONG = (431, f"the headers of a request may have at most {MAX_HEADER_BYTES} bytes")


def limited(timeout_s: float) -> type[Connection]:
    """A Connection whose headers have `timeout_s`."""
    return type("LimitedConnection", (Connection,), {"header_timeout_s": timeout_s})
