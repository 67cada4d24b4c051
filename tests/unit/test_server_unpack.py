"""Compressed bodies are decompressed, and refused before they fill the memory."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http import unpack
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.openai.errors import ApiError

TEXT = b'{"prompt": "' + b"abc " * 5000 + b'"}'
PACKED = gzip.compress(TEXT, mtime=0)  # also in the names of tests, which must not have the time


def received(data: bytes, encoding: str, *, most: int = 1 << 20, piece: int = 1000) -> tuple[bytes, int]:
    """The body that a reader makes of `data`, and how many pieces it took."""
    pieces = [data[place : place + piece] for place in range(0, len(data), piece)] or [b""]
    taken = 0

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": pieces[taken - 1], "more_body": taken < len(pieces)}

    headers = [(b"content-type", b"application/json"), (b"content-encoding", encoding.encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    reader = BodyReader(ServeConfig(max_request_bytes=most))
    try:
        return asyncio.run(reader.receive(request)), taken
    finally:
        reader.held_bytes -= request.scope.pop("vllm_lite.held_bytes", 0)
        assert reader.held_bytes == 0


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", PACKED),
        ("GZIP ", PACKED),
        ("deflate", zlib.compress(TEXT)),
        ("identity", TEXT),
    ],
)
@pytest.mark.parametrize("piece", [7, 1000, 100_000])
def test_a_packed_body_is_unpacked(encoding: str, data: bytes, piece: int) -> None:
    assert received(data, encoding, piece=piece)[0] == TEXT


@pytest.mark.parametrize(
    ("encoding", "data", "status", "says"),
    [
        ("br", TEXT, 415, "Content-Encoding must be gzip or deflate, got 'br'"),
        ("gzip, gzip", TEXT, 415, "Content-Encoding must be gzip or deflate"),
        ("gzip", TEXT, 400, "the body is not gzip data"),
        ("gzip", b"", 400, "the body ends before its gzip data does"),
        ("gzip", PACKED[:-1], 400, "the body ends before its gzip data does"),
        ("gzip", PACKED + b"x", 400, "more than one piece of gzip data"),
    ],
)
def test_invalid_data_is_explained(encoding: str, data: bytes, status: int, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        received(data, encoding)
    assert caught.value.status == status


def test_a_bomb_is_refused_when_it_has_become_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte compressed to a megabyte: at most the permitted size is decompressed, and the rest is read and
    discarded."""
    made = 0
    unpacked = unpack.unpacked

    async def counting(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
        nonlocal made
        async for piece in unpacked(pieces, encoding):
            assert len(piece) <= unpack.PIECE_BYTES
            made += len(piece)
            yield piece

    monkeypatch.setattr("vllm_lite.server.http.body.unpacked", counting)
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    with pytest.raises(ApiError, match="a body may have at most 1048576 bytes") as caught:
        received(bomb, "deflate", piece=60_000)
    assert caught.value.status == 413
    assert made <= (1 << 20) + unpack.PIECE_BYTES
