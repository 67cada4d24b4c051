"""The answers: objects with a piece for each text, made and sent some at a time, since all vectors of a long list at
once would hold the event loop."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from vllm_lite.client.pooling import PoolingStream
from vllm_lite.server.pooling.call import PoolingCall

_encode = msgspec.json.encode
PIECE_BYTES = 64 * 1024
"""About so much is made before others have their turn."""
SMALL = 16
"""An answer of so few texts is sent as one."""


def answer(
    call: PoolingCall,
    headers: dict[str, str],
    fields: dict[str, Any],
    item: Callable[[int, PoolingStream], dict[str, Any]],
) -> Response:
    """The answer of a call that has ended: `fields`, with `item` of each text under "data"."""
    head, tail = _encode({**fields, "data": []}).split(b"[]", 1)
    pieces = _joined(_encode(item(index, stream)) for index, stream in enumerate(call.streams))
    if len(call.streams) <= SMALL:
        body = b"".join((head, b"[", *pieces, b"]", tail))
        return Response(body, headers=headers, media_type="application/json")
    return StreamingResponse(_sent(head + b"[", pieces, b"]" + tail), headers=headers, media_type="application/json")


def _joined(items: Iterator[bytes]) -> Iterator[bytes]:
    for number, item in enumerate(items):
        yield b"," + item if number else item


async def _sent(head: bytes, pieces: Iterator[bytes], tail: bytes) -> AsyncIterator[bytes]:
    data = bytearray(head)
    for piece in pieces:
        data += piece
        if len(data) >= PIECE_BYTES:
            yield bytes(data)
            data.clear()
            await asyncio.sleep(0)
    yield bytes(data) + tail


def fields(call: PoolingCall, model: str) -> dict[str, Any]:
    """What stands beside the data."""
    count = call.num_prompt_tokens
    cached = sum(stream.num_cached_tokens for stream in call.streams)
    details = {"cached_tokens": cached} if cached else None
    usage = {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": details,
    }
    return {"id": call.id, "object": "list", "created": call.created, "model": model, "usage": usage}


def embedding(index: int, stream: PoolingStream, *, as_base64: bool) -> dict[str, Any]:
    """The vector of one text."""
    found: Any = base64.b64encode(stream.data).decode() if as_base64 else stream.numbers()
    return {"object": "embedding", "index": index, "embedding": found}


def pooled(index: int, stream: PoolingStream, *, as_base64: bool) -> dict[str, Any]:
    """The numbers of one text, in rows where each token has some."""
    found: Any = stream.rows() if stream.pooling.task == "token_embed" else stream.numbers()
    return {
        "object": "pooling",
        "index": index,
        "data": base64.b64encode(stream.data).decode() if as_base64 else found,
    }


def classification(index: int, stream: PoolingStream, labels: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of one text's labels, and the label with the largest."""
    numbers = stream.numbers()
    best = max(range(len(numbers)), key=numbers.__getitem__)
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)}
