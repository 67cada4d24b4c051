"""One HTTP request to a backend's socket: the head of its answer, then the body in pieces as they arrive.

Each connection serves one request. No client library is used: its work per piece of a stream takes longer than the rest
of the router.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import httptools

PIECE_BYTES = 64 * 1024
Header = tuple[bytes, bytes]


class UpstreamLost(Exception):
    """The backend closed the connection before the end of its answer, or does not listen."""


class UpstreamAnswer:
    """The answer of a backend. `open_answer` makes it; `close` ends it at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self._reader, self._writer = reader, writer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._bodies: list[bytes] = []
        self._has_head = self._is_whole = False

    async def read_head(self) -> None:
        """Read status and headers. Raises UpstreamLost."""
        while not self._has_head:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises UpstreamLost if it is truncated."""
        while True:
            bodies, self._bodies = self._bodies, []
            if bodies:
                yield bodies[0] if len(bodies) == 1 else b"".join(bodies)
            elif self._is_whole:
                return
            else:
                await self._read()

    async def whole(self) -> bytes:
        """Read the whole body. Raises UpstreamLost."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        self._writer.close()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(PIECE_BYTES)
        except OSError as error:
            raise UpstreamLost(str(error)) from error
        if not data:
            raise UpstreamLost("the connection was closed")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise UpstreamLost(f"the answer is not HTTP: {error}") from error

    # ---- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True


async def open_answer(
    socket_path: str, method: str, target: bytes, headers: Sequence[Header], body: bytes = b""
) -> UpstreamAnswer:
    """Send a request and wait for the head of its answer. Raises UpstreamLost."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    except OSError as error:
        raise UpstreamLost(f"it does not listen: {error}") from error
    answer = UpstreamAnswer(reader, writer)
    try:
        lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: localhost", b"connection: close"]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"content-length: %d" % len(body)] if body or method == "POST" else []
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        with suppress(ConnectionError):  # it may have answered already; that answer is read
            await writer.drain()
        await answer.read_head()
    except BaseException:
        answer.close()
        raise
    return answer
