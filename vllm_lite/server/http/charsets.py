"""Bodies in other encodings than UTF-8, which is what JSON is sent in: with a byte order mark, in UTF-16 or UTF-32.

PowerShell 5 writes files with either, and sends a body as its caller has encoded it.
"""

import codecs
import json

from vllm_lite.server.http.long_work import through
from vllm_lite.server.openai.errors import ApiError

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
