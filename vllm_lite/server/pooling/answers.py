"""The answers: objects with a list that has a piece for each text, made and sent some at a time: all vectors of a long
list at once, or those of a long text's tokens, would hold the event loop and take ten times their own memory."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from vllm_lite.client.pooling import PoolingStream
from vllm_lite.server.pooling.call import PoolingCall

_encode = msgspec.json.encode
PIECE_BYTES = 64 * 1024
"""About so much is made before others have their turn."""
SMALL, SMALL_BYTES = 16, 64 * 1024
"""An answer of so few texts, with so few bytes of numbers, is sent as one."""
BASE64_BYTES = 3 * 16 * 1024
"""Numbers that are encoded at a time; a multiple of three needs no padding."""

Item = Callable[[int, PoolingStream], Iterable[bytes]]
"""JSON of the text with this number, in pieces."""


def answer(
    call: PoolingCall, headers: dict[str, str], fields: dict[str, Any], item: Item, name: str = "data"
) -> Response:
    """The answer of a call that has ended: `fields` and, behind them, a list `name` with `item` of each text."""
    pieces = _object(fields, name, _list(item(index, stream) for index, stream in enumerate(call.streams)))
    num_bytes = sum(len(stream.data) for stream in call.streams)
    if len(call.streams) <= SMALL and num_bytes <= SMALL_BYTES:
        return Response(b"".join(pieces), headers=headers, media_type="application/json")
    return StreamingResponse(_sent(pieces), headers=headers, media_type="application/json")


def _object(fields: dict[str, Any], name: str, value: Iterable[bytes]) -> Iterator[bytes]:
    """An object of `fields`, of which there are some, and of `name` with a value in pieces."""
    yield _encode(fields)[:-1] + b"," + _encode(name) + b":"
    yield from value
    yield b"}"


def _list(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield b"["
    for number, item in enumerate(items):
        if number:
            yield b","
        yield from item
    yield b"]"


def _base64(data: bytes) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, len(data), BASE64_BYTES):
        yield base64.b64encode(data[start : start + BASE64_BYTES])
    yield b'"'


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= PIECE_BYTES:
            yield bytes(data)
            data.clear()
            await asyncio.sleep(0)
    yield bytes(data)


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


def embedding(index: int, stream: PoolingStream, *, as_base64: bool) -> Iterable[bytes]:
    """The vector of one text."""
    return _object({"object": "embedding", "index": index}, "embedding", _vector(stream, as_base64=as_base64))


def pooled(index: int, stream: PoolingStream, *, as_base64: bool) -> Iterable[bytes]:
    """The numbers of one text, in rows where each token has some."""
    found: Iterable[bytes]
    if stream.pooling.task == "token_embed" and not as_base64:
        found = _list([_encode(row)] for row in stream.rows())
    else:
        found = _vector(stream, as_base64=as_base64)
    return _object({"object": "pooling", "index": index}, "data", found)


def vector(_: int, stream: PoolingStream) -> Iterable[bytes]:
    """The vector of one text and nothing else."""
    return _vector(stream, as_base64=False)


def _vector(stream: PoolingStream, *, as_base64: bool) -> Iterable[bytes]:
    return _base64(stream.data) if as_base64 else [_encode(stream.numbers())]


def classification(index: int, stream: PoolingStream, labels: tuple[str, ...]) -> Iterable[bytes]:
    """The numbers of one text's labels, and the label with the largest."""
    numbers = stream.numbers()
    best = max(range(len(numbers)), key=numbers.__getitem__)
    label = labels[best] if best < len(labels) else None
    return [_encode({"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)})]
