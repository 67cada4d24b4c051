"""Bodies: how much of them is read, for how long, and what they are decoded into."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import Request

from vllm_lite.server import bodies
from vllm_lite.server.bodies import GenerateBody, Sampling
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.errors import ApiError

DRAIN_S = 2.0
"""How long a body that is refused is still read, so that its client comes to read the answer."""

B = TypeVar("B", bound=msgspec.Struct)


class Reader:
    """Every method raises ApiError."""

    def __init__(self, config: ServeConfig) -> None:
        self._max_bytes = config.max_request_bytes
        self._timeout_s = config.body_timeout_s

    async def read(self, request: Request, kind: type[B]) -> tuple[B, dict[str, str]]:
        """The body, and the header that says what of it is ignored."""
        return decode(await self.receive(request), kind)

    async def receive(self, request: Request) -> bytes:
        """The body as it is, which has to be JSON."""
        media = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, f"the body must be application/json, got {media!r}")
        limit, timeout_s = self._max_bytes, self._timeout_s
        length = request.headers.get("content-length", "0")
        data = bytearray()
        too_long = length.isdecimal() and int(length) > limit
        try:
            async with asyncio.timeout(DRAIN_S if too_long else timeout_s) as patience:
                async for piece in _pieces(request):
                    if too_long:
                        continue
                    data += piece
                    if len(data) > limit:
                        too_long = True
                        data.clear()
                        patience.reschedule(asyncio.get_running_loop().time() + DRAIN_S)
        except TimeoutError as error:
            if not too_long:
                text = f"the body must come within {timeout_s:g} s"
                raise ApiError(408, text, headers={"Connection": "close"}) from error
        if too_long:
            raise ApiError(413, f"a body may have at most {limit} bytes", headers={"Connection": "close"})
        return bytes(data)


def decode(data: bytes, kind: type[B]) -> tuple[B, dict[str, str]]:
    """A body, and the header that says what of it is ignored. Raises ApiError."""
    body, ignored = bodies.read(data, kind)
    wanted = body.sampling_params if isinstance(body, GenerateBody) else body
    if isinstance(wanted, Sampling) and wanted.prompt_logprobs is not None and getattr(body, "stream", None):
        raise ApiError(400, "prompt_logprobs are not told in a stream", "prompt_logprobs")
    return body, bodies.warning(ignored)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ApiError if the client goes."""
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ApiError(400, "the client has gone")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
