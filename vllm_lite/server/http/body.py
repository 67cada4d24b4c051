"""Reads bodies: how much of them, for how long, and into what they are decoded.

What decoding makes of a body can be far larger than the body: a list that holds nothing is two bytes of it and 80 of
memory. So it is counted, while the body comes, how many values it can hold at most.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http.callers import is_page
from vllm_lite.server.http.charsets import as_utf8
from vllm_lite.server.http.disconnect import disconnected
from vllm_lite.server.http.unpack import unpacked
from vllm_lite.server.openai import bodies, decoding
from vllm_lite.server.openai.bodies import GenerateBody, SamplingFields
from vllm_lite.server.openai.errors import ApiError

DRAIN_S = 2.0
"""How long a body that is refused is still read, so that its client comes to read the answer."""
MAX_VALUES = 1 << 20
"""Lists, objects and commas of a body, or tokens of a context if those are more; those in texts are counted as well, as
that is what can be counted fast. As many take up to 80 MB and 100 ms."""
SMALL_BYTES = 64 * 1024
"""So much of each body is always taken."""
MAX_HELD = 2
"""Bodies of the longest kind that may be held at a time, by all clients together, beyond what of each is small."""
BIG_BYTES = 256 * 1024
"""Longer bodies are decoded in a thread."""
RETRY_AFTER_S = 1
_HELD = "vllm_lite.held_bytes"
"""In a request's scope: how many of the held bytes are its own."""
_SIZE = "vllm_lite.request_size"
"""In a request's scope: bytes and values of its body, and of what it takes from what the server keeps."""

B = TypeVar("B", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]


class BodyReader:
    """Reads and decodes bodies, within limits for each and for all at a time. Every method raises ApiError."""

    def __init__(self, config: ServeConfig, max_model_len: int = 0) -> None:
        self._max_bytes = config.max_request_bytes
        self._max_values = max(MAX_VALUES, max_model_len + SMALL_BYTES)
        self._timeout_s = config.body_timeout_s
        self.held_bytes = 0
        """Bytes of the bodies that are not yet whole, and of those that are not yet tokenized."""
        self.kept_bytes = 0
        """Bytes of bodies that are kept while their requests wait and run. They have as much room of their own: large
        requests that take long keep no other body from being read."""

    def holding(self, endpoint: Endpoint) -> Endpoint:
        """Wrap `endpoint`: when it ends, the bytes of the body that it has read are no longer counted as held."""

        async def held(request: Request) -> Response:
            try:
                return await endpoint(request)
            finally:
                self.held_bytes -= request.scope.pop(_HELD, 0)

        return held

    def hold(self, request: Request, data: bytes | memoryview) -> None:
        """Count `data`, which the request takes from what the server keeps, as a part of its body. Raises ApiError."""
        num_bytes, num_values = request.scope.get(_SIZE, (0, 0))
        num_bytes += len(data)
        num_values += _num_values(bytes(data)) if num_bytes <= self._max_bytes else 0  # what is too long is not read
        request.scope[_SIZE] = num_bytes, num_values
        if num_bytes > self._max_bytes or num_values > self._max_values:
            text = (
                f"the earlier responses that this request refers to have, with its body, {num_bytes} bytes and "
                f"{num_values} lists, objects and commas; at most {self._max_bytes} and {self._max_values} are taken"
            )
            raise ApiError(400, text)
        refusal = self._refusal(request, num_bytes, num_values)
        if refusal is not None:
            raise refusal

    def keep(self, request: Request) -> int:
        """Count what the request holds as kept, also when its endpoint has ended. Returns how many bytes that are, for
        release(). Raises ApiError if too much is kept."""
        num_bytes: int = request.scope.get(_HELD, 0)
        if self.kept_bytes + num_bytes > MAX_HELD * self._max_bytes:
            text = f"requests that wait or run keep {self.kept_bytes} bytes, and this one is too much; try again later"
            raise ApiError(429, text, headers={"Retry-After": str(RETRY_AFTER_S)})
        self.kept_bytes += num_bytes
        return num_bytes

    def release(self, num_bytes: int) -> None:
        """No longer count bytes as kept."""
        self.kept_bytes -= num_bytes

    async def read(self, request: Request, kind: type[B], *, needs_type: bool = True) -> tuple[B, dict[str, str]]:
        """Return the body, and the header that names the fields that are ignored."""
        return await decoded(await self.receive(request, needs_type=needs_type), kind)

    async def receive(self, request: Request, *, needs_type: bool = True) -> bytes:
        """Return the body, in UTF-8 whatever it came in. It has to be declared as JSON: that a web page may not send to
        another site unasked. Without `needs_type` that is asked of web pages alone, which browsers tell by headers."""
        media = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media != "application/json" and (needs_type or is_page(request.headers)):
            raise ApiError(415, f"the body must have Content-Type: application/json, got {media!r}")
        length = request.headers.get("content-length", "0")
        refusal = self._too_long() if length.isdecimal() and int(length) > self._max_bytes else None
        encoding = request.headers.get("content-encoding", "").strip().lower()
        pieces, data, num_values = _pieces(request), bytearray(), 0
        try:
            async with asyncio.timeout(self._timeout_s if refusal is None else DRAIN_S) as patience:
                if refusal is None:
                    async for piece in unpacked(pieces, encoding):
                        data += piece
                        num_values += _num_values(piece)
                        refusal = self._refusal(request, len(data), num_values)
                        if refusal is not None:
                            data.clear()
                            self.held_bytes -= request.scope.pop(_HELD, 0)
                            patience.reschedule(asyncio.get_running_loop().time() + DRAIN_S)
                            break
                async for _ in pieces:  # what is left of one that is refused
                    pass
        except TimeoutError as error:
            if refusal is None:
                text = f"the body must come within {self._timeout_s:g} s"
                raise ApiError(408, text, headers={"Connection": "close"}) from error
        if refusal is not None:
            raise refusal
        request.scope[_SIZE] = len(data), num_values
        return await as_utf8(bytes(data), BIG_BYTES)

    def _refusal(self, request: Request, num_bytes: int, num_values: int) -> ApiError | None:
        """The error of a body of this size so far; None, and the bytes count as held, if it is within limits."""
        if num_bytes > self._max_bytes:
            return self._too_long()
        if num_values > self._max_values:
            text = f"a body may have at most {self._max_values} lists, objects and commas"
            return ApiError(413, text, headers={"Connection": "close"})
        more = max(0, num_bytes - SMALL_BYTES) - request.scope.setdefault(_HELD, 0)
        if self.held_bytes + more > MAX_HELD * self._max_bytes:
            text = f"bodies of {self.held_bytes} bytes are being read, and this one is too much; try again later"
            return ApiError(429, text, headers={"Connection": "close", "Retry-After": str(RETRY_AFTER_S)})
        self.held_bytes += more
        request.scope[_HELD] += more
        return None

    def _too_long(self) -> ApiError:
        return ApiError(413, f"a body may have at most {self._max_bytes} bytes", headers={"Connection": "close"})


def _num_values(data: bytes) -> int:
    """Largest number of values that a part of a body can begin."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


async def decoded(data: bytes, kind: type[B]) -> tuple[B, dict[str, str]]:
    """Do the same as decode(), in a thread if the body is long."""
    return await asyncio.to_thread(decode, data, kind) if len(data) > BIG_BYTES else decode(data, kind)


async def top_level(data: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """Do the same as decoding.top_level(), in a thread if the body is long."""
    return await asyncio.to_thread(decoding.top_level, data) if len(data) > BIG_BYTES else decoding.top_level(data)


def decode(data: bytes, kind: type[B]) -> tuple[B, dict[str, str]]:
    """Return the body, and the header that names the fields that are ignored. Raises ApiError."""
    body, ignored = bodies.read(data, kind)
    wanted = body.sampling_params if isinstance(body, GenerateBody) else body
    if isinstance(wanted, SamplingFields) and wanted.prompt_logprobs is not None and getattr(body, "stream", None):
        raise ApiError(400, "prompt_logprobs are not told in a stream", "prompt_logprobs")
    if isinstance(body, bodies.Body) and body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options are for a stream: give stream=true with them", "stream_options")
    if getattr(body, "resumable", None) and not getattr(body, "stream", None):
        raise ApiError(400, "only a stream is resumable: give stream=true with it, or leave it out", "resumable")
    return body, bodies.warning(ignored)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes. Raises ApiError if the client disconnects."""
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise disconnected()
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
