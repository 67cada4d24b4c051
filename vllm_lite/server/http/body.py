"""BodyReader: reads and decodes request bodies within limits of size, time and memory.

A decoded body can be far larger than its bytes. So its decoded size is estimated while it arrives (weight.py): bounds
apply to the structure of one body, and to the memory of all bodies that are being read and decoded.
"""

import asyncio
import codecs
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http.callers import is_page
from vllm_lite.server.http.disconnect import disconnected
from vllm_lite.server.http.long_work import through
from vllm_lite.server.http.unpack import unpacked
from vllm_lite.server.http.weight import Scale, Weight, weighed
from vllm_lite.server.openai import bodies, decoding
from vllm_lite.server.openai.bodies import GenerateBody, SamplingFields
from vllm_lite.server.openai.errors import ApiError

DRAIN_S = 2.0
"""Seconds for which a refused body is still read, so that its client gets to read the answer."""
MAX_BYTES = 4 * 1024 * 1024
"""Default maximum of a body's bytes. Rendering a chat of this size with wide characters takes about 60 MB."""
MAX_IMAGE_BYTES = 32 * 1024 * 1024
"""The same for a model that takes images, which come in data: URLs."""
BYTES_PER_TOKEN = 8
"""A longer context raises the maximum to this many bytes per token."""
MAX_COMMAS = 300_000
"""Maximum number of commas outside of strings, or the tokens of a context if those are more. As many short strings take
20 MB."""
MAX_NESTED = 100_000
"""Maximum number of lists, objects and named fields. As many take up to 13 MB."""
SMALL_BYTES = 64 * 1024
"""Bytes of each body that do not count as held."""
SLICE_BYTES = 64 * 1024
"""Bytes weighed at a time, in 0.5 ms."""
MAX_HELD = 6
"""Bound on held memory, in bodies of the maximum size, over all clients; SMALL_BYTES of each body do not count. A
single body above the bound is accepted if nothing else is held."""
MAX_KEPT = 4
"""The same bound for bodies that are kept while their requests wait and run."""
RETRY_AFTER_S = 1
_HELD = "vllm_lite.held_bytes"
"""Scope key: the number of held bytes that are the request's."""
_SIZE = "vllm_lite.request_size"
"""Scope key: the weight of the request's body, including stored data that it refers to."""

B = TypeVar("B", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]


class BodyReader:
    """Reads and decodes bodies, within limits for each and for all at a time. Every method raises ApiError."""

    def __init__(self, config: ServeConfig, max_model_len: int = 0, *, takes_images: bool = False) -> None:
        least = MAX_IMAGE_BYTES if takes_images else MAX_BYTES
        self._max_bytes = config.max_request_bytes or max(least, BYTES_PER_TOKEN * max_model_len)
        self._max_commas = max(MAX_COMMAS, max_model_len + SMALL_BYTES)
        self._timeout_s = config.body_timeout_s
        self._turn = asyncio.Lock()
        self.held_bytes = 0
        """Memory of bodies that are being read, decoded or tokenized."""
        self.kept_bytes = 0
        """Memory of bodies that are kept while their requests wait and run. It has a bound of its own, so that long
        requests do not keep other bodies from being read."""

    def holding(self, endpoint: Endpoint) -> Endpoint:
        """Wrap `endpoint`: when it returns, its request's body no longer counts as held."""

        async def held(request: Request) -> Response:
            try:
                return await endpoint(request)
            finally:
                self.held_bytes -= request.scope.pop(_HELD, 0)

        return held

    def holding_all(self, routes: Iterable[Route]) -> list[Route]:
        """The routes with `holding` endpoints."""
        return [Route(route.path, self.holding(route.endpoint), methods=route.methods) for route in routes]

    async def hold(self, request: Request, data: bytes | memoryview) -> None:
        """Count `data`, stored data that the request refers to, as a part of its body. Raises ApiError."""
        weight: Weight = request.scope.get(_SIZE, Weight())
        if weight.num_bytes + len(data) > self._max_bytes:  # beyond the limit, it is refused without weighing
            weight = weight.plus(Weight(len(data)))
        else:
            weight = weight.plus(await through(len(data), lambda: weighed(data)))
        request.scope[_SIZE] = weight
        if weight.num_bytes > self._max_bytes or self._has_too_many(weight):
            text = (
                f"the earlier responses that this request refers to have, with its body, {weight.num_bytes} bytes, "
                f"{weight.num_commas} commas and {weight.num_nested} lists, objects and named fields; at most "
                f"{self._max_bytes}, {self._max_commas} and {MAX_NESTED} are taken"
            )
            raise ApiError(400, text)
        refusal = self._refusal(request, weight)
        if refusal is not None:
            raise refusal

    def keep(self, request: Request, num_more: int = 0) -> int:
        """Count the request's held bytes, and `num_more` bytes made of them, as kept beyond the end of its endpoint.
        Returns the number of bytes to pass to release(). Raises ApiError if too much is kept."""
        num_bytes: int = request.scope.get(_HELD, 0) + max(0, num_more - SMALL_BYTES)
        if self.kept_bytes and self.kept_bytes + num_bytes > MAX_KEPT * self._max_bytes:
            text = f"requests that wait or run keep {self.kept_bytes} bytes, and this one is too much; try again later"
            raise ApiError(429, text, headers={"Retry-After": str(RETRY_AFTER_S)})
        self.kept_bytes += num_bytes
        return num_bytes

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes as kept."""
        self.kept_bytes -= num_bytes

    async def read(self, request: Request, kind: type[B], *, needs_type: bool = True) -> tuple[B, dict[str, str]]:
        """Return the body, and the header that names the fields that are ignored."""
        return await decoded(await self.receive(request, needs_type=needs_type), kind)

    async def receive(self, request: Request, *, needs_type: bool = True) -> bytes:
        """Return the body in UTF-8. It must be declared as JSON, which a web page cannot send to another site without
        asking. Without `needs_type`, only requests of web pages, recognized by their headers, must be."""
        media = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media != "application/json" and (needs_type or is_page(request.headers)):
            raise ApiError(415, f"the body must have Content-Type: application/json, got {media!r}")
        length = request.headers.get("content-length", "0")
        refusal = self._too_long() if length.isdecimal() and int(length) > self._max_bytes else None
        encoding = request.headers.get("content-encoding", "").strip().lower()
        pieces, data, scale = _pieces(request), io.BytesIO(), Scale()
        try:
            async with asyncio.timeout(self._timeout_s if refusal is None else DRAIN_S) as patience:
                if refusal is None:
                    async for piece in unpacked(pieces, encoding):
                        data.write(piece)
                        await self._weigh(scale, piece)
                        refusal = self._refusal(request, scale.weight)
                        if refusal is not None:
                            data = io.BytesIO()
                            self.held_bytes -= request.scope.pop(_HELD, 0)
                            patience.reschedule(asyncio.get_running_loop().time() + DRAIN_S)
                            break
                async for _ in pieces:  # drain a refused body
                    pass
        except TimeoutError as error:
            if refusal is None:
                text = f"the body must come within {self._timeout_s:g} s"
                raise ApiError(408, text, headers={"Connection": "close"}) from error
        if refusal is not None:
            raise refusal
        request.scope[_SIZE] = scale.weight
        return await as_utf8(data.getvalue())  # no copy: BytesIO hands out its own bytes

    async def _weigh(self, scale: Scale, piece: bytes) -> None:
        """Weigh a piece. For long bodies the event loop runs after each slice, and only one body is weighed at a
        time."""
        if scale.weight.num_bytes + len(piece) <= SMALL_BYTES:
            scale.feed(piece)
            return
        for start in range(0, len(piece), SLICE_BYTES):
            async with self._turn:
                scale.feed(piece[start : start + SLICE_BYTES])
                await asyncio.sleep(0)

    def _refusal(self, request: Request, weight: Weight) -> ApiError | None:
        """The error for a body of this weight so far; None, counting it as held, if it is within limits."""
        if weight.num_bytes > self._max_bytes:
            return self._too_long()
        if self._has_too_many(weight):
            text = (
                f"a body may have at most {self._max_commas} commas and {MAX_NESTED} lists, objects and named fields "
                "outside of its texts"
            )
            return ApiError(413, text, headers={"Connection": "close"})
        own = request.scope.setdefault(_HELD, 0)
        more = max(0, weight.memory_bytes - SMALL_BYTES) - own
        is_alone = self.held_bytes == own
        if more > 0 and not is_alone and self.held_bytes + more > MAX_HELD * self._max_bytes:
            text = f"bodies that take {self.held_bytes} bytes are being read, and this one is too much; try again later"
            return ApiError(429, text, headers={"Connection": "close", "Retry-After": str(RETRY_AFTER_S)})
        self.held_bytes += more
        request.scope[_HELD] += more
        return None

    def _has_too_many(self, weight: Weight) -> bool:
        return weight.num_commas > self._max_commas or weight.num_nested > MAX_NESTED

    def _too_long(self) -> ApiError:
        text = f"a body may have at most {self._max_bytes} bytes (--max-request-bytes)"
        return ApiError(413, text, headers={"Connection": "close"})


def memory_of(request: Request) -> int:
    """Return the maximum memory of a request's body, with the stored data that it refers to."""
    weight: Weight = request.scope.get(_SIZE, Weight())
    return weight.memory_bytes


async def decoded(data: bytes, kind: type[B]) -> tuple[B, dict[str, str]]:
    """As decode(), in a thread if the body is long."""
    return await through(len(data), lambda: decode(data, kind))


async def top_level(data: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """As decoding.top_level(), in a thread if the body is long."""
    return await through(len(data), lambda: decoding.top_level(data))


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
    """Yield the body as it arrives. Raises ApiError if the client disconnects."""
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise disconnected()
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


# ---- Bodies in other encodings than UTF-8: with a byte order mark, in UTF-16 or UTF-32. PowerShell 5 writes files with
# either, and sends a body as its caller has encoded it.


PIECE_BYTES = 64 * 1024
"""Bytes decoded at a time, in less than 10 ms even if every character is invalid."""
MAX_REPLACED = 1 << 16
_PLAIN = "utf-8"


async def as_utf8(data: bytes) -> bytes:
    """Convert JSON to UTF-8 from the encoding that its first bytes show, in a thread if it is long.

    Invalid characters are replaced. Raises ApiError for more than MAX_REPLACED.
    """
    encoding = json.detect_encoding(data)
    if encoding == _PLAIN:
        return data
    return await through(len(data), lambda: _decoded(data, encoding))


def _decoded(data: bytes, encoding: str) -> bytes:
    decoder, whole, num_replaced = codecs.getincrementaldecoder(encoding)("replace"), [], 0
    for place in range(0, len(data), PIECE_BYTES):
        text = decoder.decode(data[place : place + PIECE_BYTES], place + PIECE_BYTES >= len(data))
        num_replaced += text.count("\ufffd")
        if num_replaced > MAX_REPLACED:
            raise ApiError(400, f"the body is not a text in {encoding}: over {MAX_REPLACED} characters are none")
        whole.append(text.encode())
    return b"".join(whole)
