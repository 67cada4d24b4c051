"""Reads bodies: how much of them, for how long, and into what they are decoded.

What decoding makes of a body can be far larger than the body. So it is weighed while it comes (weight.py): how much
structure one may have is bounded, and how much memory all of them may take that are being read and decoded.
"""

import asyncio
import codecs
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
"""How long a body that is refused is still read, so that its client comes to read the answer."""
MAX_BYTES = 4 * 1024 * 1024
"""Longest body where the settings say nothing. Rendering one whose texts are wide takes about 60 MB."""
MAX_IMAGE_BYTES = 32 * 1024 * 1024
"""The same where images come in data: URLs."""
BYTES_PER_TOKEN = 8
"""As much more of a body is taken for each token of a context that is longer than MAX_BYTES would do."""
MAX_COMMAS = 300_000
"""Outside of texts, or tokens of a context if those are more. As many short texts take 20 MB."""
MAX_NESTED = 100_000
"""Lists, objects and named fields. As many take up to 13 MB."""
SMALL_BYTES = 64 * 1024
"""Memory that is always taken for each body."""
SLICE_BYTES = 64 * 1024
"""Weighed in one go, in 0.5 ms."""
MAX_HELD = 6
"""Bodies of the longest kind that may be held at a time, by all clients together, beyond what of each is small. One
whose memory is more than all of that is taken if nothing else is held."""
MAX_KEPT = 4
"""The same of those that are kept while their requests wait and run."""
RETRY_AFTER_S = 1
_HELD = "vllm_lite.held_bytes"
"""In a request's scope: how many of the held bytes are its own."""
_SIZE = "vllm_lite.request_size"
"""In a request's scope: the weight of its body, and of what it takes from what the server keeps."""

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
        """Memory of the bodies that are not yet whole, and of those that are not yet tokenized."""
        self.kept_bytes = 0
        """Memory of bodies that are kept while their requests wait and run. They have room of their own: large requests
        that take long keep no other body from being read."""

    def holding(self, endpoint: Endpoint) -> Endpoint:
        """Wrap `endpoint`: when it ends, the body that it has read is no longer counted as held."""

        async def held(request: Request) -> Response:
            try:
                return await endpoint(request)
            finally:
                self.held_bytes -= request.scope.pop(_HELD, 0)

        return held

    async def hold(self, request: Request, data: bytes | memoryview) -> None:
        """Count `data`, which the request takes from what the server keeps, as a part of its body. Raises ApiError."""
        weight: Weight = request.scope.get(_SIZE, Weight())
        if weight.num_bytes + len(data) > self._max_bytes:  # what is too long is not read
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
        """Count what the request holds as kept, and `num_more` bytes that are made of it, also when its endpoint has
        ended. Returns how many bytes that are, for release(). Raises ApiError if too much is kept."""
        num_bytes: int = request.scope.get(_HELD, 0) + max(0, num_more - SMALL_BYTES)
        if self.kept_bytes and self.kept_bytes + num_bytes > MAX_KEPT * self._max_bytes:
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
                async for _ in pieces:  # what is left of one that is refused
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
        """Weigh a piece. Of long bodies one slice is weighed between two turns of the loop, of all clients together."""
        if scale.weight.num_bytes + len(piece) <= SMALL_BYTES:
            scale.feed(piece)
            return
        for start in range(0, len(piece), SLICE_BYTES):
            async with self._turn:
                scale.feed(piece[start : start + SLICE_BYTES])
                await asyncio.sleep(0)

    def _refusal(self, request: Request, weight: Weight) -> ApiError | None:
        """The error of a body of this weight so far; None, and it counts as held, if it is within limits."""
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
    """Return the memory that the body of a request takes at most, with what the request takes of earlier ones."""
    weight: Weight = request.scope.get(_SIZE, Weight())
    return weight.memory_bytes


async def decoded(data: bytes, kind: type[B]) -> tuple[B, dict[str, str]]:
    """Do the same as decode(), in a thread if the body is long."""
    return await through(len(data), lambda: decode(data, kind))


async def top_level(data: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """Do the same as decoding.top_level(), in a thread if the body is long."""
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
    """Yield the body as it comes. Raises ApiError if the client disconnects."""
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise disconnected()
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


# ---- Bodies in other encodings than UTF-8, which is what JSON is sent in: with a byte order mark, in UTF-16 or UTF-32
#
# PowerShell 5 writes files with either, and sends a body as its caller has encoded it.


PIECE_BYTES = 64 * 1024
"""Decoded in one go, in less than 10 ms also where each character is at fault."""
MAX_REPLACED = 1 << 16
_PLAIN = "utf-8"


async def as_utf8(data: bytes) -> bytes:
    """Return JSON in UTF-8, from whatever encoding its first bytes show; in a thread if it is long.

    What is no character is replaced. Raises ApiError if that is too much.
    """
    encoding = json.detect_encoding(data)
    if encoding == _PLAIN:
        return data
    return await through(len(data), lambda: _decoded(data, encoding))


def _decoded(data: bytes, encoding: str) -> bytes:
    """Raises ApiError."""
    decoder, whole, num_replaced = codecs.getincrementaldecoder(encoding)("replace"), [], 0
    for place in range(0, len(data), PIECE_BYTES):
        text = decoder.decode(data[place : place + PIECE_BYTES], place + PIECE_BYTES >= len(data))
        num_replaced += text.count("\ufffd")
        if num_replaced > MAX_REPLACED:
            raise ApiError(400, f"the body is no text in {encoding}: over {MAX_REPLACED} characters are none")
        whole.append(text.encode())
    return b"".join(whole)
