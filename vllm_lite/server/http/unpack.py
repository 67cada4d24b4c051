"""Compressed bodies (Content-Encoding), decompressed piece by piece, as a small body can become very large."""

import asyncio
import zlib
from collections.abc import AsyncIterator

from vllm_lite.server.openai.errors import ApiError

PIECE_BYTES = 256 * 1024
"""Bytes decompressed at a time, in less than a millisecond."""
_ENCODINGS = ("gzip", "x-gzip", "deflate")
_EITHER = 32 + zlib.MAX_WBITS
"""Window bits for zlib: detect gzip or zlib by the first bytes."""


async def unpacked(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the body, decompressed in pieces of at most PIECE_BYTES; the event loop runs between them.

    Raises ApiError for an unknown encoding, and for invalid or truncated data.
    """
    if encoding in ("", "identity"):
        async for piece in pieces:
            yield piece
        return
    if encoding not in _ENCODINGS:
        raise ApiError(415, f"Content-Encoding must be gzip or deflate, got {encoding!r}")
    unpacker = zlib.decompressobj(_EITHER)
    async for packed in pieces:
        left = packed
        while left:
            try:
                yield unpacker.decompress(left, PIECE_BYTES)
            except zlib.error as error:
                raise ApiError(400, f"the body is not {encoding} data: {error}") from error
            if unpacker.unused_data:
                raise ApiError(400, f"the body has more than one piece of {encoding} data")
            left = unpacker.unconsumed_tail
            await asyncio.sleep(0)
    if not unpacker.eof:
        raise ApiError(400, f"the body ends before its {encoding} data does")
