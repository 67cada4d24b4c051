"""One HTTP request to a backend's socket: its answer's head, then its body in the pieces in which they come.

A connection is for one request. There is no client library in between: what it would do for each piece of a stream
takes longer than all the rest of the way through the router.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import httptools

PIECE_BYTES = 64 * 1024
Header = tuple[bytes, bytes]


class UpstreamLost(Exception):
    """The backend has closed the connection before its answer was whole, or does not listen."""


class UpstreamAnswer:
    """The answer of a backend. `open_answer` makes it; `close` ends it, whatever has come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self._reader, self._writer = reader, writer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._bodies: list[bytes] = []
        self._has_head = self._is_whole = False

    async def read_head(self) -> None:
        """Raises UpstreamLost."""
        while not self._has_head:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises UpstreamLost if it is cut."""
        while True:
            bodies, self._bodies = self._bodies, []
            if bodies:
                yield bodies[0] if len(bodies) == 1 else b"".join(bodies)
            elif self._is_whole:
                return
            else:
                await self._read()

    async def whole(self) -> bytes:
        """Raises UpstreamLost."""
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
        with suppress(ConnectionError):  # it may have answered already; what it has said is read
            await writer.drain()
        await answer.read_head()
    except BaseException:
        answer.close()
        raise
    return answer
