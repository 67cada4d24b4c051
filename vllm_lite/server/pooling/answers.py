"""Answers with a list of one piece per text, written and sent in pieces: all vectors of a long list, or of a long
text's tokens, would block the event loop if written at once, and take ten times their own memory."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from vllm_lite.client.pooling import PoolingStream
from vllm_lite.client.token_classes import EntityFinder, classified
from vllm_lite.protocol.pooling import TOKEN_TASKS
from vllm_lite.server.pooling.call import PoolingCall
from vllm_lite.server.pooling.encodings import FLOAT_BYTES, Encoding

_encode = msgspec.json.encode
PIECE_BYTES = 64 * 1024
"""Bytes that are written before the event loop runs other tasks."""
SMALL, SMALL_BYTES = 16, 64 * 1024
"""Maximum texts, and bytes of numbers, of an answer that is sent at once."""
BASE64_BYTES = 3 * 16 * 1024
"""Bytes of numbers encoded at a time; a multiple of three needs no padding."""

Item = Callable[[int, PoolingStream], Iterable[bytes]]
"""Writes the JSON of one text, given its number, in pieces."""


def answer(
    call: PoolingCall, headers: dict[str, str], fields: dict[str, Any], item: Item, name: str = "data"
) -> Response:
    """The answer of a finished call: `fields`, then a list `name` with `item` of each text."""
    return sent(call, headers, fields, name, _list(item(index, stream) for index, stream in enumerate(call.streams)))


def sent(
    call: PoolingCall, headers: dict[str, str], fields: dict[str, Any], name: str, value: Iterable[bytes]
) -> Response:
    """The answer of a finished call: `fields`, then `name` with a value in pieces."""
    pieces = _object(fields, name, value)
    num_bytes = sum(len(stream.data) for stream in call.streams)
    if len(call.streams) <= SMALL and num_bytes <= SMALL_BYTES:
        return Response(b"".join(pieces), headers=headers, media_type="application/json")
    return StreamingResponse(_sent(pieces), headers=headers, media_type="application/json")


def _object(fields: dict[str, Any], name: str, value: Iterable[bytes]) -> Iterator[bytes]:
    """Write an object of `fields` (at least one), and of `name` with a value in pieces."""
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
    """Fields of the answer other than the data."""
    count = call.num_prompt_tokens
    cached = sum(stream.num_cached_tokens for stream in call.streams)
    details = {"cached_tokens": cached} if cached else None
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": details}
    return {"id": call.id, "object": "list", "created": call.created, "model": model, "usage": usage}


def binary_answer(call: PoolingCall, headers: dict[str, str], encoding: Encoding, *, model: str | None) -> Response:
    """All numbers as bytes, text after text. With `model`, a header describes each text's range, as vLLM's does."""
    if model is not None:
        start, places = 0, []
        for index, stream in enumerate(call.streams):
            count = len(stream.data) // FLOAT_BYTES
            rows = [len(stream.prompt.token_ids)] if stream.pooling.task in TOKEN_TASKS else []
            end = start + count * encoding.num_bytes
            place = {"index": index, "embed_dtype": encoding.dtype, "endianness": encoding.endianness}
            shape = [*rows, count // (rows[0] if rows else 1)]
            places.append({**place, "start": start, "end": end, "shape": shape})
            start = end
        found = fields(call, model)
        metadata = {name: found[name] for name in ("id", "created", "model", "usage")}
        headers = {**headers, "metadata": _encode({**metadata, "data": places}).decode()}
    pieces = (encoding.of(stream.data) for stream in call.streams)
    return StreamingResponse(_sent(pieces), headers=headers, media_type="application/octet-stream")


def embedding(index: int, stream: PoolingStream, *, encoding: Encoding | None) -> Iterable[bytes]:
    """The vector of one text, as a list of numbers or, with an encoding, in base64."""
    return _object({"object": "embedding", "index": index}, "embedding", _vector(stream, encoding))


def pooled(index: int, stream: PoolingStream, *, encoding: Encoding | None) -> Iterable[bytes]:
    """The numbers of one text: in rows for a token task without base64, else as one vector."""
    found: Iterable[bytes]
    if stream.pooling.task in TOKEN_TASKS and encoding is None:
        found = _list([_encode(row)] for row in stream.rows())
    else:
        found = _vector(stream, encoding)
    return _object({"object": "pooling", "index": index}, "data", found)


def vector(_: int, stream: PoolingStream) -> Iterable[bytes]:
    return _vector(stream, None)


def _vector(stream: PoolingStream, encoding: Encoding | None) -> Iterable[bytes]:
    return [_encode(stream.numbers())] if encoding is None else _base64(encoding.of(stream.data))


def typed(call: PoolingCall, kinds: Sequence[str]) -> Iterator[bytes]:
    """The vectors in Cohere's format: for each kind, a list over all texts. Kinds of bits need a multiple of 8
    numbers."""
    yield b"{"
    for place, kind in enumerate(kinds):
        make = _TYPED[kind]
        yield (b"," if place else b"") + _encode(kind) + b":"
        yield from _list(make(stream) for stream in call.streams)
    yield b"}"


def _bits(stream: PoolingStream, shift: int) -> Iterable[bytes]:
    """Pack the sign of each number into a bit, set unless it is negative, eight to a byte; `shift` is subtracted from
    each byte."""
    bits = "".join("0" if number < 0 else "1" for number in stream.numbers())
    return [_encode([int(bits[start : start + 8], 2) - shift for start in range(0, len(bits), 8)])]


_TYPED: dict[str, Callable[[PoolingStream], Iterable[bytes]]] = {
    "float": lambda stream: _vector(stream, None),
    "base64": lambda stream: _vector(stream, Encoding(endianness="little")),
    "binary": lambda stream: _bits(stream, 128),
    "ubinary": lambda stream: _bits(stream, 0),
}


def found_entities(stream: PoolingStream, finder: EntityFinder, *, redact: bool) -> bytes:
    """The fields of one text's entities as JSON, without braces."""
    outputs = classified(stream, finder).outputs
    shown = {"entities": outputs.entities, **({"redacted": outputs.redacted} if redact else {})}
    return _encode(shown)[1:-1]


def entities(index: int, stream: PoolingStream, *, found: Sequence[bytes]) -> Iterable[bytes]:
    """The entities of one text, as written by found_entities()."""
    del stream
    return [_encode({"object": "token_classification", "index": index})[:-1], b",", found[index], b"}"]


def classification(index: int, stream: PoolingStream, labels: tuple[str, ...]) -> Iterable[bytes]:
    """The numbers of one text's labels, and the label with the largest."""
    numbers = stream.numbers()
    best = max(range(len(numbers)), key=numbers.__getitem__)
    label = labels[best] if best < len(labels) else None
    return [_encode({"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)})]
