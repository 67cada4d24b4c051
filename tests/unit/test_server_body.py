"""Bodies as they come: how much of them is held, by all clients together, and what is counted before decoding."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.deadlines import scaled
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http import body as reading
from vllm_lite.server.http.body import MAX_HELD, MAX_VALUES, SMALL_BYTES, BodyReader, decode
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
        """So many pieces more, all of which have been read."""
        for _ in range(count):
            self.may_send.release()
        async with asyncio.timeout(DEADLINE_S):
            while not self.may_send.locked():  # noqa: ASYNC110 - whoever reads takes them
                await asyncio.sleep(0)
        await asyncio.sleep(0)


def prompt_of(num_bytes: int) -> bytes:
    return b'{"prompt":"' + b"x" * (num_bytes - 13) + b'"}'


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_what_is_not_yet_whole_is_bounded_in_sum() -> None:
    """Two of 40 clients that send nearly whole bodies can; what is held never exceeds the sum."""

    async def main() -> None:
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
        assert 36 <= len(refused) < 40
        assert read.held_bytes == 0

    run(main)


def test_what_is_small_is_always_taken() -> None:
    async def main() -> None:
        read = reader()
        read.held_bytes = MAX_HELD * MAX_BYTES
        body, _ = await read.read(Sender(prompt_of(SMALL_BYTES), waits=False).request, CompletionBody)
        assert isinstance(body.prompt, str)
        with pytest.raises(ApiError) as caught:
            await read.read(Sender(prompt_of(SMALL_BYTES + 1), waits=False).request, CompletionBody)
        assert caught.value.status == 429

    run(main)


def test_a_body_is_held_until_its_route_has_made_something_of_it() -> None:
    async def main() -> None:
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

    run(main)


@pytest.mark.parametrize(
    "value",
    [b"[]", b"{}", b'""', b"1", b'{"type":"text"}', b"[[[]]]"],
    ids=["lists", "dicts", "texts", "ints", "parts", "deep"],
)
def test_values_are_counted_before_they_are_made(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has too many is not decoded, and no more of it is kept."""

    async def main() -> None:
        read = BodyReader(ServeConfig(max_request_bytes=32 << 20))
        kept: list[int] = []
        monkeypatch.setattr(reading, "decode", lambda *_: kept.append(1))
        sender = Sender(b'{"prompt":[' + b",".join([value] * (MAX_VALUES + 1)) + b"]}", waits=False)
        with pytest.raises(ApiError, match=f"at most {MAX_VALUES} lists, objects and commas") as caught:
            await read.read(sender.request, CompletionBody)
        assert caught.value.status == 413
        assert kept == []
        assert read.held_bytes == 0

    run(main)


def test_a_context_of_more_tokens_may_be_asked_for_whole() -> None:
    async def main() -> None:
        data = b'{"prompt":[' + b",".join([b"1"] * (MAX_VALUES + 10)) + b"]}"
        read = BodyReader(ServeConfig(max_request_bytes=32 << 20), max_model_len=2 * MAX_VALUES)
        body, _ = await read.read(Sender(data, waits=False).request, CompletionBody)
        assert len(body.prompt) == MAX_VALUES + 10

    run(main)


def test_a_big_body_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
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

    run(main)


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
