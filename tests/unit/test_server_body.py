"""Bodies as they come: how much of them is held, by all clients together, and what is counted before decoding."""

import asyncio
import codecs
import json
import re
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from tests.deadlines import scaled
from vllm_lite.client.text import surrogates
from vllm_lite.client.text.surrogates import without_halves
from vllm_lite.client.text.templates.chat_template import with_read_arguments
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http import body as charsets
from vllm_lite.server.http import body as reading
from vllm_lite.server.http.body import (
    BYTES_PER_TOKEN,
    MAX_COMMAS,
    MAX_HELD,
    MAX_NESTED,
    SMALL_BYTES,
    BodyReader,
    decode,
)
from vllm_lite.server.http.body import MAX_BYTES as DEFAULT_BYTES
from vllm_lite.server.http.weight import NESTED_BYTES
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody
from vllm_lite.server.openai.errors import ApiError

DEADLINE_S = scaled(30.0)
MAX_BYTES = 1_000_000
PIECE = 60_000


def reader(**settings: Any) -> BodyReader:
    return BodyReader(ServeConfig(max_request_bytes=MAX_BYTES, **settings))


class Sender:
    """A client that sends `data` piece by piece, each when it is told to."""

    def __init__(self, data: bytes, *, waits: bool = True) -> None:
        self.pieces = [data[place : place + PIECE] for place in range(0, len(data), PIECE)]
        self.may_send = asyncio.Semaphore(0 if waits else len(self.pieces))
        self.num_sent = 0
        headers = [(b"content-type", b"application/json")]
        self.request = Request({"type": "http", "method": "POST", "headers": headers}, self.receive)

    async def receive(self) -> dict[str, Any]:
        await self.may_send.acquire()
        self.num_sent += 1
        more = self.num_sent < len(self.pieces)
        return {"type": "http.request", "body": self.pieces[self.num_sent - 1], "more_body": more}

    async def sends(self, count: int) -> None:
        """Send `count` more pieces, and wait until all have been read."""
        for _ in range(count):
            self.may_send.release()
        async with asyncio.timeout(DEADLINE_S):
            while not self.may_send.locked():  # noqa: ASYNC110 - whoever reads takes them
                await asyncio.sleep(0)
        await asyncio.sleep(0)


def prompt_of(num_bytes: int) -> bytes:
    return b'{"prompt":"' + b"x" * (num_bytes - 13) + b'"}'


async def test_the_sum_of_incomplete_bodies_is_limited() -> None:
    """Six of 40 clients that send nearly whole bodies can; what is held never exceeds the sum."""

    read = reader()
    senders = [Sender(prompt_of(MAX_BYTES)) for _ in range(40)]
    endpoint = read.holding(cast(Any, read.receive))
    tasks = [asyncio.ensure_future(endpoint(sender.request)) for sender in senders]
    most = 0
    for _ in range(16):
        for sender, task in zip(senders, tasks, strict=True):
            if not task.done():
                await sender.sends(1)
            most = max(most, read.held_bytes)
    assert MAX_HELD * MAX_BYTES * 0.9 < most <= MAX_HELD * MAX_BYTES
    for sender, task in zip(senders, tasks, strict=True):
        await sender.sends(len(sender.pieces) - sender.num_sent) if not task.done() else None
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ApiError)]
    assert {error.status for error in refused} == {429}
    assert {error.headers["Retry-After"] for error in refused} == {"1"}
    assert 40 - 2 * MAX_HELD <= len(refused) <= 40 - MAX_HELD + 2
    assert read.held_bytes == 0


async def test_small_bodies_are_always_read() -> None:
    read = reader()
    read.held_bytes = MAX_HELD * MAX_BYTES
    small = prompt_of(SMALL_BYTES - 2 * NESTED_BYTES)
    body, _ = await read.read(Sender(small, waits=False).request, CompletionBody)
    assert isinstance(body.prompt, str)
    with pytest.raises(ApiError) as caught:
        await read.read(Sender(prompt_of(SMALL_BYTES + 1), waits=False).request, CompletionBody)
    assert caught.value.status == 429


async def test_a_body_is_held_until_its_route_has_made_something_of_it() -> None:
    read, may_end = reader(), asyncio.Event()

    async def route(request: Request) -> Response:
        await read.receive(request)
        await may_end.wait()
        raise ValueError

    task = asyncio.ensure_future(read.holding(route)(Sender(prompt_of(500_000), waits=False).request))
    async with asyncio.timeout(DEADLINE_S):
        while read.held_bytes < 500_000 - SMALL_BYTES:  # noqa: ASYNC110 - it reads
            await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(ValueError):
        await task
    assert read.held_bytes == 0


@pytest.mark.parametrize(
    ("value", "most"),
    [
        (b"[]", MAX_NESTED),
        (b"{}", MAX_NESTED),
        (b'""', MAX_COMMAS),
        (b"1", MAX_COMMAS),
        (b'{"type":"text"}', MAX_NESTED // 2),
        (b"[[[]]]", MAX_NESTED // 3),
    ],
    ids=["lists", "dicts", "texts", "ints", "parts", "deep"],
)
async def test_values_are_counted_before_they_are_made(
    value: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body with too many values is not decoded, and no more of it is kept."""

    read = BodyReader(ServeConfig(max_request_bytes=32 << 20))
    kept: list[int] = []
    monkeypatch.setattr(reading, "decode", lambda *_: kept.append(1))
    sender = Sender(b'{"prompt":[' + b",".join([value] * (most + 2)) + b"]}", waits=False)
    text = f"at most {MAX_COMMAS} commas and {MAX_NESTED} lists, objects and named fields outside of its texts"
    with pytest.raises(ApiError, match=text) as caught:
        await read.read(sender.request, CompletionBody)
    assert caught.value.status == 413
    assert kept == []
    assert read.held_bytes == 0


async def test_a_context_of_more_tokens_may_be_asked_for_whole() -> None:
    num_tokens = 2 * MAX_COMMAS
    data = b'{"prompt":[' + b",".join([b"123456"] * num_tokens) + b"]}"
    assert len(data) > DEFAULT_BYTES
    read = BodyReader(ServeConfig(), max_model_len=num_tokens)
    body, _ = await read.read(Sender(data, waits=False).request, CompletionBody)
    assert len(body.prompt) == num_tokens
    longer = b'{"prompt":"' + b"x" * BYTES_PER_TOKEN * num_tokens + b'"}'
    for most in (num_tokens, 1):
        with pytest.raises(ApiError, match=r"at most \d+ bytes \(--max-request-bytes\)"):
            await BodyReader(ServeConfig(), most).read(Sender(longer, waits=False).request, CompletionBody)


async def test_a_big_body_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    threads: list[bool] = []
    decode = reading.decode

    def seen(data: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(data, kind)

    monkeypatch.setattr(reading, "decode", seen)
    for size in (1000, MAX_BYTES):
        await reader().read(Sender(prompt_of(size), waits=False).request, CompletionBody)
    assert threads == [True, False]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_options_of_a_stream_need_one(kind: type[CompletionBody | ChatBody]) -> None:
    more: dict[str, Any]
    given = {"prompt": "x"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "x"}]}
    for more in ({"stream_options": {"include_usage": True}}, {"stream_options": {}, "stream": False}):
        with pytest.raises(ApiError, match="stream_options are for a stream") as caught:
            decode(msgspec.json.encode({**given, **more}), kind)
        assert (caught.value.status, caught.value.param) == (400, "stream_options")
    for more in ({"stream_options": None}, {"stream_options": {"include_usage": True}, "stream": True}):
        decode(msgspec.json.encode({**given, **more}), kind)


# ---- encodings


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
"""Encodings that begin with a byte order mark, and encodings without one."""
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


async def prompt_in(data: bytes) -> Any:
    return (await reader().read(Sender(data, waits=False).request, CompletionBody))[0].prompt


@given(TEXTS, st.sampled_from(ENCODINGS), st.booleans(), st.integers(1, 40))
async def test_a_body_is_read_in_whatever_encoding_it_begins(
    text: str, encoding: str, escapes: bool, size: int
) -> None:
    """PowerShell 5 writes files in UTF-16, and `[Text.Encoding]::Unicode.GetBytes` makes such bodies; in pieces of any
    size."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charsets, "PIECE_BYTES", size)
        data = json.dumps({"prompt": text}, ensure_ascii=escapes).encode(encoding)
        assert await prompt_in(data) == text
        big = codecs.BOM_UTF16_BE + data if encoding == "utf-16-be" else data
        assert await prompt_in(big) == text


async def test_a_big_body_in_utf_16_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    threads: list[bool] = []
    decoded = charsets._decoded

    def seen(data: bytes, encoding: str) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return decoded(data, encoding)

    monkeypatch.setattr(charsets, "_decoded", seen)
    for size in (1000, MAX_BYTES // 2 - 1):
        prompt = await prompt_in(prompt_of(size).decode().encode("utf-16"))
        assert len(prompt) == size - 13
    assert threads == [True, False]


async def test_invalid_utf_16_is_replaced_up_to_a_limit() -> None:
    half = '{"prompt":"a\ud83db"}'.encode("utf-16", "surrogatepass")
    assert await prompt_in(half) == "a\ufffdb"
    assert await prompt_in('{"prompt":"\U0001f600"}'.encode("utf-16")) == "\U0001f600"
    many = ('{"prompt":"' + "\ud83d" * (charsets.MAX_REPLACED + 1) + '"}').encode("utf-16", "surrogatepass")
    with pytest.raises(ApiError, match="the body is not a text in utf-16: over 65536 characters") as caught:
        await prompt_in(many)
    assert caught.value.status == 400


@pytest.mark.parametrize("data", ['{"prompt":"\xe9"}'.encode("latin-1"), b'{"prompt":"\xed\xa0\x80"}'])
async def test_invalid_unicode_is_one_sentence(data: bytes) -> None:
    """PowerShell 5 sends ISO 8859-1 without saying so, unless it is told a charset."""
    with pytest.raises(ApiError, match=r"byte 0xe[9d] of a text is not UTF-8 .*charset=utf-8'") as caught:
        await prompt_in(data)
    assert caught.value.status == 400


# ---- halves of surrogate pairs


PARTS = [
    rb"\ud800",
    rb"\uDBff",
    rb"\udc00",
    rb"\uDFFF",
    rb"\ud83d\ude00",
    rb"\\",
    rb"\"",
    rb"\n",
    rb"\u0041",
    b"u",
    b"d8",
    b"a",
]
TOKENS = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.|[^\\]")
HALF_SENTENCE = rb'{"prompt":"a\ud83d b \\ud83d","stop":["\ude00"],"brand\ud800new":1}'


@given(st.lists(st.sampled_from(PARTS), max_size=30), st.integers(13, 60))
def test_a_half_of_a_pair_is_replaced_and_nothing_else(parts: list[bytes], size: int) -> None:
    """Escape by escape, in pieces of any size: the same as reading it from its beginning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surrogates, "PIECE_BYTES", size)
        data = b"".join(parts)
        wanted = TOKENS.sub(lambda match: rb"\ufffd" if match.group(1) else match.group(), data)
        assert without_halves(data) == wanted
        msgspec.json.decode(b'"%b"' % wanted)


def test_a_session_with_half_a_surrogate_in_its_history_continues() -> None:
    body, ignored = decode(HALF_SENTENCE, CompletionBody)
    assert (body.prompt, body.stop) == ("a\ufffd b \\ud83d", ["\ufffd"])
    assert "brand" in ignored["Warning"]
    call = {"function": {"name": "f", "arguments": rb'{"text":"\ud83d"}'.decode()}}
    assert with_read_arguments([call])[0]["function"]["arguments"] == {"text": "\ufffd"}


def test_halves_without_end_are_refused() -> None:
    for count, is_read in ((surrogates.MAX_HALVES, True), (surrogates.MAX_HALVES + 1, False)):
        data = b'{"prompt":"' + rb"\ud800" * count + b'"}'
        if is_read:
            assert decode(data, CompletionBody)[0].prompt == "\ufffd" * count
        else:
            with pytest.raises(ApiError, match="the body is not valid JSON"):
                decode(data, CompletionBody)
    assert without_halves(b'"\xff\xff\\ud800"') == b'"\xff\xff\\ud800"'
