"""HTTP/1.1 client of `bench serve`: POSTs a body and passes on the events of the answer as they arrive; connections are
reused.

A benchmark shares the machine with the server, so the client must cost next to nothing per token: httptools parses, the
events of one read are split together and get the same time, and no task wakes before an answer has ended.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

from vllm_lite.errors import ConfigError, VllmLiteError

MAX_EVENT_BYTES = 4 * 1024 * 1024
CONNECT_S = 30.0
PASSED_S = 1.0
"""An idle connection that ends this soon after a request was sent had been closed by the server before it got the
request."""

Events = Callable[[list[bytes], float], None]
"""Called with the data of the events of one read, and its time (perf_counter)."""


class HttpError(VllmLiteError):
    """A request failed: no answer (`status` 0), or a status other than 200."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _Unanswered(HttpError):
    """The connection ended soon, before an answer began. If it was idle before, the server has not got the request."""


class SseReader:
    """Parses an event stream, in pieces, into the data of its events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes. Raises HttpError for an event that is too long."""
        if not piece:
            return []
        if self._after_cr and piece.startswith(b"\n"):  # the second half of a line's end
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._num_bytes += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._num_bytes = 0
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise HttpError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events


class _Connection(asyncio.Protocol):
    """A connection, with one exchange at a time. The `on_` methods are called by httptools."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[bytes] | None = None
        self._events: Events | None = None
        self._reader = SseReader()
        self._body = bytearray()
        self._now_s = self._asked_s = 0.0
        self._answered = False

    async def exchange(self, request: bytes, events: Events | None) -> bytes:
        """Send `request`; the answer's events are passed to `events`, or its body is returned. Raises HttpError."""
        if self.transport is None:
            raise HttpError("not connected")
        self._done = asyncio.get_running_loop().create_future()
        self._events, self._reader, self.reusable, self._answered = events, SseReader(), False, False
        self._body.clear()
        self._asked_s = time.perf_counter()
        self.transport.write(request)
        try:
            return await self._done
        finally:
            self._done = self._events = None
            if not self.reusable:
                self.transport.abort()

    # ---- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods but is not a subclass

    def data_received(self, data: bytes) -> None:
        self._now_s, self._answered = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, HttpError) else HttpError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        is_soon = time.perf_counter() - self._asked_s < PASSED_S
        failure = _Unanswered if is_soon and not self._answered else HttpError
        self._fail(failure(f"the connection ended before the answer did{f' ({exc})' if exc else ''}"))

    def _fail(self, error: HttpError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # ---- called by the parser

    def on_body(self, body: bytes) -> None:
        if self._events is not None and self._parser.get_status_code() == 200:
            if events := self._reader.feed(body):
                self._events(events, self._now_s)
        elif len(self._body) < MAX_EVENT_BYTES:  # only the beginning of a longer body is kept
            self._body += body

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._done is None or self._done.done():
            self.reusable = False  # an answer without a request
        elif (status := self._parser.get_status_code()) == 200:
            self._done.set_result(bytes(self._body))
        elif status >= 200:
            text = self._body.decode("utf-8", "replace").strip()
            self._done.set_exception(HttpError(f"HTTP {status}: {text}", status))


class HttpClient:
    """Connections to one server. `headers` are sent with every request."""

    def __init__(self, base_url: str, headers: dict[str, str], *, check_tls: bool = True) -> None:
        """Raises ConfigError for a malformed URL, or a header that cannot be sent."""
        self.base_url = base_url.rstrip("/")
        try:
            parts = urlsplit(self.base_url)
        except ValueError as error:
            raise ConfigError(f"a server's address must look like http://[::1]:8000, got {base_url!r}") from error
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"the port of {base_url!r} must be a number up to 65535") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"a server's address must look like http://127.0.0.1:8000, got {base_url!r}")
        for name, value in headers.items():
            if not name.isascii() or set(name + value) & set("\r\n\0") or not name.strip():
                raise ConfigError(f"{name!r}: {value!r} cannot be sent as a header")
        self._host, self._path = parts.hostname, parts.path
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = _tls(check=check_tls) if parts.scheme == "https" else None
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "text/event-stream", **headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.headers = text.encode(errors="surrogateescape")  # bytes of the environment that are not UTF-8 stay
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> bytes:
        """GET `path`; returns the body of an answer with status 200. Raises HttpError."""
        return await self._exchange(f"GET {self.url(path)} HTTP/1.1\r\n", b"", None)

    async def post(self, path: str, body: bytes) -> bytes:
        """POST a JSON `body`; returns the body of an answer with status 200. Raises HttpError."""
        return await self._post(path, body, None)

    async def stream(self, path: str, body: bytes, events: Events) -> None:
        """POST a JSON `body`. Returns when the answer is complete; raises HttpError if it is not, or its status is not
        200."""
        await self._post(path, body, events)

    async def _post(self, path: str, body: bytes, events: Events | None) -> bytes:
        head = f"POST {self.url(path)} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._exchange(head, body, events)

    async def _exchange(self, head: str, body: bytes, events: Events | None) -> bytes:
        request = b"".join((head.encode(), self.headers, b"\r\n", body))
        while (idle := self._take_idle()) is not None:
            with suppress(_Unanswered):  # closed by the server before it got the request
                return await self._ask(idle, request, events)
        return await self._ask(await self._connect(), request, events)

    async def _ask(self, connection: _Connection, request: bytes, events: Events | None) -> bytes:
        try:
            return await connection.exchange(request, events)
        finally:
            if connection.reusable:
                self._idle.append(connection)

    def _take_idle(self) -> _Connection | None:
        """An idle connection that has not been closed, as far as known."""
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            raise HttpError(f"{self.base_url} cannot be reached: {str(error) or 'no answer'}") from error
        return made

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.abort()
        self._idle.clear()

    def url(self, path: str) -> str:
        """The full path of a route. The base URL may end with /v1 or not."""
        return self._path.removesuffix("/v1") + path if path.startswith("/v1/") else self._path + path


def _tls(*, check: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not check:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
