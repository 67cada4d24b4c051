"""HttpConnection: an HTTP/1.1 connection with limits on the size and time of headers, on bytes that a client sends
ahead, and on the time in which it must read answers.

uvicorn has none of these limits: a client could send endless headers, or never end them, or send endless requests,
which become objects before their keys are checked. Nor does uvicorn notice that the client of a request has gone once
another request follows on the connection. framing.py adds what else uvicorn lacks of HTTP/1.1.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from vllm_lite.runtime import log
from vllm_lite.server.http.framing import head_without_offer, new_parser, relative, without_chunks
from vllm_lite.server.openai.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024
PIECE_BYTES = 4096
"""Bytes parsed before the connection checks whether a request waits already. The shortest request has 18 bytes, and
takes 3 kB."""
MAX_UNPARSED_BYTES = 64 * 1024
"""Maximum number of unparsed bytes after a waiting request. Beyond it the connection is not read, and a disconnect not
noticed."""

logger = log.get(__name__)


class _Refused(Exception):
    """Ends the parsing of a head."""


class _Flow(FlowControl):
    """Resumes reading only if `may_read()`: uvicorn resumes it after every response, and whenever a body is read."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        if self._may_read():
            super().resume_reading()


class HttpConnection(HttpToolsProtocol):
    """A connection with limits; with_timeouts() sets the times.

    At most two requests of a connection are parsed at a time, the one being answered and the next, plus others in the
    same piece. Later bytes stay unparsed until the first request is answered.
    """

    header_timeout_s: float
    write_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unparsed = b""
        self._unsent_bytes = 0
        self._unread_since_s: float | None = None
        self.header_bytes = 0
        """Bytes of headers, trailers and chunk headers since the message began, or since the last part of its body."""
        self._in_headers = True  # from the start: a client that sends nothing is too slow as well
        self._is_new = False  # a message or body part has begun in the current piece, so limits restart
        self._timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        self._broken: RequestResponseCycle | None = None
        """The last of the waiting requests, if its body turned out to be malformed."""
        self._is_over = False  # later bytes are ignored: they follow something that is not HTTP
        self._error = ApiError(400, "what was sent is not HTTP")

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self._may_read)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.unparsed = b""
        self.pipeline.clear()
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._parse(self.unparsed + data)
        if not self._may_read():
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse(self.unparsed)
        self.flow.resume_reading()

    def look(self, now_s: float) -> None:
        """Called periodically: close the connection of a client that has read nothing for write_timeout_s, also while
        closing."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        if self._unread_since_s is None or self._unsent_bytes < before:
            self._unread_since_s = now_s
        if not self._unsent_bytes:
            self._unread_since_s = None
        elif now_s - self._unread_since_s > self.write_timeout_s:
            where = self.client[0] if self.client else "a client"
            logger.warning("%s has not read for %.0f s; it is cut off", where, now_s - self._unread_since_s)
            self.transport.abort()

    def _may_read(self) -> bool:
        return len(self.unparsed) < MAX_UNPARSED_BYTES

    def _parse(self, data: bytes) -> None:
        """Parse `data` piece by piece, until a request waits."""
        done = len(data) if self._is_over else 0
        while done < len(data) and not self.pipeline and not self.transport.is_closing():
            self._parse_piece(data[done : done + PIECE_BYTES])
            done += PIECE_BYTES
        self.unparsed = data[done:]

    def _parse_piece(self, piece: bytes) -> None:
        self._is_new = False
        self._unset_keepalive_if_required()
        try:
            self._feed(piece)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._is_over or self.transport.is_closing():
            return
        if not self._is_new:
            self.header_bytes += len(piece)
            if self.header_bytes > MAX_HEADER_BYTES:
                self._error = _TOO_LONG
                self.send_400_response("")
                return
        if self._timer is None and self._is_idle():  # uvicorn's own timer ended with the first byte
            self._start_timer()

    def _feed(self, data: bytes) -> None:
        """Feed the parser. A request that offers another protocol is parsed as if it did not. Raises
        HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # the parser has read the head, and nothing after it
                data = head_without_offer(self.parser, self.url, self.headers) + data[offer.args[0] :]
                self.parser = new_parser(self)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._is_new = True
        self.header_bytes = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are not headers: checks of headers have not seen them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            raise self._refusal(_TOO_LONG)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._refusal(_NO_PROXY)
            return  # _feed() has the head parsed again
        self._stop_timer()
        self._in_headers = False
        self.url, self.headers[:] = relative(self.url, self.headers)
        self.expect_100_continue = self.expect_100_continue and self.parser.get_http_version() == "1.1"
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn pauses it when a request waits, but only reading shows a disconnect

    def on_body(self, body: bytes) -> None:
        self.header_bytes = 0
        self._is_new = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle is self._broken:
            app = self._error.response()
        if cycle.scope["http_version"] != "1.1":
            cycle.keep_alive, app = False, without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base's words, which are not JSON
        """Answer with `_error`, either before there is a request, or in place of the waiting request whose body is
        malformed, after the answers to earlier ones. Bytes after a complete request get no answer. The connection ends
        after the last answer."""
        self._is_over = True
        latest = self.cycle
        is_own = latest is self._answered and latest is not None and latest.more_body and not latest.response_started
        if latest is not None and not latest.response_complete and not is_own:
            latest.keep_alive = False
            if latest is not self._answered and latest.more_body:
                self._broken = latest
            return
        body = self._error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[self._error.status] + head + body)
        self.transport.close()

    def _refusal(self, error: ApiError) -> Exception:
        """Set the error to answer with, and return the exception that a callback of the parser raises."""
        self._error = error
        return _Refused()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_idle(self) -> bool:
        """Whether all requests have been answered and no new one has begun."""
        return self.cycle is not None and self.cycle.response_complete

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self._is_idle():
            self._start_timer()  # after the answer, the client has the full time again
            return
        if not self._in_headers:
            self.transport.close()
            return
        self._error = ApiError(408, f"the headers of a request must come within {self.header_timeout_s:g} s")
        self.send_400_response("")


_TOO_LONG = ApiError(431, f"the headers of a request may have at most {MAX_HEADER_BYTES} bytes")
_NO_PROXY = ApiError(405, "CONNECT is for proxies, and this is a server; ask for a path")


def with_timeouts(header_timeout_s: float, write_timeout_s: float) -> type[HttpConnection]:
    """A subclass of HttpConnection with these times: for the headers, and for the client to read."""
    times = {"header_timeout_s": header_timeout_s, "write_timeout_s": write_timeout_s}
    return type("TimedConnection", (HttpConnection,), times)
