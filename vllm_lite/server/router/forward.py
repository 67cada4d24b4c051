"""Forwards a client's request to the processes of its model.

The whole body is read, as `model` can be anywhere in it; no other field is decoded. A request whose model ends before
it answers is sent once more, when the model is loaded again; a stream that has begun ends with an error in its own
format.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_lite.runtime import log
from vllm_lite.server.http.auth import require_admin
from vllm_lite.server.http.body import BodyReader, top_level
from vllm_lite.server.http.dialects import REQUEST_ID
from vllm_lite.server.http.disconnect import until_disconnected
from vllm_lite.server.ollama.errors import body as ollama_body
from vllm_lite.server.openai import decoding
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router.fleet import Fleet, Lease
from vllm_lite.server.router.member import FleetModel
from vllm_lite.server.router.upstream import Header, UpstreamAnswer, UpstreamLost

MAX_TRIES = 2
"""Maximum number of tries, so that a request that kills its model does so at most twice."""
END_S = 2.0
"""Seconds to detect the end of processes, once their connection was cut."""
_NOT_SENT_ON = frozenset(
    b"host connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect content-length "
    b"content-encoding x-request-id origin sec-fetch-site sec-fetch-mode sec-fetch-dest".split()
)
"""Headers of the connection, and those about the calling web page, which the router has checked."""
_NOT_SENT_BACK = frozenset(b"connection keep-alive transfer-encoding x-request-id date server".split())

logger = log.get(__name__)


class RoutedBody(msgspec.Struct, frozen=True):
    """The body of a request, decompressed and in UTF-8, and its undecoded fields."""

    body: bytes
    fields: dict[str, msgspec.Raw]

    def field(self, name: str, kind: Any) -> Any:
        """Decode a field; None if it is absent. Raises ApiError."""
        return decoding.decode(self.fields[name], kind) if name in self.fields else None


async def read_routed(request: Request, reader: BodyReader) -> RoutedBody:
    """Read a request's body, which may be empty. Raises ApiError."""
    is_empty = request.headers.get("content-length", "" if "transfer-encoding" in request.headers else "0") == "0"
    if request.method == "GET" or is_empty:
        return RoutedBody(b"", {})
    needs_type = not request.scope["path"].startswith("/api/")
    body, fields = await top_level(await reader.receive(request, needs_type=needs_type))
    return RoutedBody(body, fields)


class ForwardedAnswer(Response):
    """The answer of the model's processes, forwarded piece by piece as it arrives."""

    def __init__(
        self,
        fleet: Fleet,
        member: FleetModel,
        request: Request,
        routed: RoutedBody,
        reader: BodyReader,
        *,
        needs_loaded: bool = True,
    ) -> None:
        """`needs_loaded`: False for requests that a sleeping model's processes can answer. Raises ApiError if too many
        bytes of waiting requests are kept already."""
        self._fleet, self._member, self._reader = fleet, member, reader
        self._method, self._target = request.method, target_of(request.scope)
        self._sent = sent_on(request)
        self._body = routed.body
        self._needs_loaded = needs_loaded
        self._kept = reader.keep(request)
        self.background = None

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Forward the request and its answer. Raises ApiError if nothing has been sent yet."""
        working = asyncio.ensure_future(self._work(send))
        watch = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait((working, watch), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            self._reader.release(self._kept)
            for task in (working, watch):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _work(self, send: Send) -> None:
        for place in range(MAX_TRIES):
            async with self._lease() as lease:
                try:
                    answer = await lease.backend.open(self._method, self._target, self._sent, self._body)
                except UpstreamLost as error:
                    lost, backend = error, lease.backend
                else:
                    try:
                        await self._send_on(answer, send)
                    finally:
                        answer.close()
                    return
            await self._ended(backend)
            name = self._member.entry.name
            logger.warning("%s was lost before it answered (%s), try %d of %d", name, lost, place + 1, MAX_TRIES)
        text = f"the processes of the model {self._member.entry.name!r} ended while they had this request; ask again"
        raise ApiError(503, text, headers={"Retry-After": "1"})

    @asynccontextmanager
    async def _lease(self) -> AsyncIterator[Lease]:
        """Lease the model, or use its processes without a lease. Raises ApiError."""
        if self._needs_loaded:
            async with self._fleet.lease(self._member) as lease:
                yield lease
        elif (backend := self._member.backend) is not None:
            yield Lease(self._member, backend)
        else:
            raise ApiError(404, f"the model {self._member.entry.name!r} has been unloaded")

    async def _ended(self, backend: Any) -> None:
        """Wait until the end of processes whose connection was cut is detected."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while backend.ended() is None:  # noqa: ASYNC110 - set on another thread
                    await asyncio.sleep(0.01)
        self._fleet.look()

    async def _send_on(self, answer: UpstreamAnswer, send: Send) -> None:
        headers = [header for header in answer.headers if header[0] not in _NOT_SENT_BACK]
        self._body = b""
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            async for piece in answer.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except UpstreamLost as error:
            last = self._cut(dict(headers).get(b"content-type", b""))
            if not last:
                raise ConnectionError(
                    f"{self._member.entry.name}: {error}"
                ) from error  # cuts the client's connection as well
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _cut(self, media: bytes) -> bytes:
        """The error event that ends the stream of a model that has ended; b"" if the answer is not a stream."""
        error = ApiError(503, f"the processes of the model {self._member.entry.name!r} have ended; ask again")
        if media.startswith(b"text/event-stream"):
            return b"data: " + error.body() + b"\n\n"
        return ollama_body(error) + b"\n" if media.startswith(b"application/x-ndjson") else b""


def target_of(scope: Scope) -> bytes:
    """The request target, from the path as the router has normalized it."""
    query = scope.get("query_string", b"")
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~-._").encode()
    return path + b"?" + query if query else path


def sent_on(request: Request) -> list[Header]:
    """The headers to forward. The model's processes trust everybody who reaches their socket as a program of this
    machine, so other senders are marked as coming through a proxy, which they do."""
    headers = [(name, value) for name, value in request.scope["headers"] if name not in _NOT_SENT_ON]
    headers.append((b"x-request-id", request.scope[REQUEST_ID].encode()))
    try:
        require_admin(request)
    except ApiError:
        headers.append((b"x-forwarded-for", (request.client.host if request.client else "unknown").encode()))
    return headers
