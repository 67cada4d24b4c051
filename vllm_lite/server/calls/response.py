"""A call as an HTTP response, whole or streamed.

The status of a stream is decided by its first event: a request that the engine refuses gets an error response like any
other, not a stream.
"""

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.errors import RequestError, VllmLiteError
from vllm_lite.server.calls.call import Call, Choice, Reading
from vllm_lite.server.http.disconnect import until_disconnected
from vllm_lite.server.openai.bodies import field_of
from vllm_lite.server.openai.errors import ApiError, failed, refused

PING_S = 15.0
"""Maximum silence of a stream in seconds: proxies close connections that are silent."""
MANY_TOKENS = 256
"""Tokens with logprobs in one write of a stream, beyond which a thread encodes them."""
_WRITER = ThreadPoolExecutor(1, "writer")
Made = TypeVar("Made")


async def beside_the_loop(make: Callable[[], Made]) -> Made:
    """Call `make` in the one thread for long writes. Each of several would keep the interpreter from the loop for 5 ms
    at a time, and the objects of several answers would exist at once."""
    return await asyncio.get_running_loop().run_in_executor(_WRITER, make)


class Writer(Protocol):
    """Writes one answer: the events of a stream, or the whole body. See AnswerWriter. `ping` is sent on a stream after
    PING_S of silence."""

    @property
    def ping(self) -> bytes: ...

    def opening(self) -> list[bytes]: ...

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes: ...

    def closing(self) -> list[bytes]: ...

    def failure(self, error: ApiError) -> bytes: ...

    def whole(self) -> bytes: ...


class CallResponse(Response):
    """Sends the output of `call` until the call has ended or the reading is over."""

    def __init__(
        self,
        call: Call,
        writer: Writer,
        run: Callable[[Call], AbstractContextManager[Reading]],
        *,
        stream: bool,
        headers: dict[str, str],
    ) -> None:
        """`run` begins a reading of the call, and starts it in the engine if necessary. At exit, the reading is over,
        and the call is ended or kept for another reading."""
        kind = "text/event-stream; charset=utf-8" if stream else "application/json"
        super().__init__(headers={"content-type": kind, **headers})
        self._own_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._call = call
        self._writer = writer
        self._run = run
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self._run(self._call) as reading:
            watch = asyncio.ensure_future(until_disconnected(receive))
            watch.add_done_callback(lambda _: reading.end())
            try:
                await (self._send_chunks(reading, send) if self._stream else self._send_whole(reading, send))
            finally:
                watch.cancel()

    async def _send_whole(self, reading: Reading, send: Send) -> None:
        call = self._call
        while not call.has_ended and not reading.is_over and not call.was_cut:
            await reading.wait()
        if reading.is_over:
            return
        if call.error is not None or call.was_cut:
            raise as_error(call)
        params = call.streams[0].params
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        body = await self._made(self._writer.whole, is_long=has_logprobs)
        headers = [*self._own_headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_chunks(self, reading: Reading, send: Send) -> None:
        call, writer = self._call, self._writer
        await reading.wait()
        if call.was_cut or (call.error is not None and not (reading.is_resumed and call.has_begun)):
            raise as_error(call)
        if reading.is_replaced:
            raise ApiError(409, "the stream continues on a newer connection")
        if reading.is_over:
            return
        headers = [*self._own_headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = b"".join(writer.opening())
        while not reading.is_over:
            ended = call.has_ended
            data += await self._chunks(list(reading.deltas()))
            if ended:
                data += b"".join(writer.closing()) if call.error is None else writer.failure(as_error(call))
            now_s = time.monotonic()
            if not data and now_s - reading.sent_s >= PING_S:
                data = writer.ping
            if data:
                reading.sent_s = now_s
                await send({"type": "http.response.body", "body": data, "more_body": not ended})
            if ended:
                reading.is_complete = True
                return
            data = b""
            await reading.wait()
        if reading.is_replaced:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self, deltas: list[tuple[Choice, CompletionOutput]]) -> bytes:
        """Write a chunk for each delta. A choice that shows nothing before its end has one long delta."""
        many = sum(len(delta.logprobs or ()) for _, delta in deltas) > MANY_TOKENS
        return await self._made(
            lambda: b"".join([self._writer.chunk(choice, delta) for choice, delta in deltas]), is_long=many
        )

    async def _made(self, make: Callable[[], bytes], *, is_long: bool) -> bytes:
        """Call `make`, beside the loop if it `is_long`: writing the logprobs of one token takes 20 us or more."""
        return await beside_the_loop(make) if is_long else make()


def as_error(call: Call) -> ApiError:
    """Return the error of a call. It is the request's fault (4xx) only if nothing was generated, if its deadline has
    passed, or if its grammar cannot continue, which can happen at any token."""
    error = call.error
    if error is None and call.was_cut:
        return ApiError(503, "the server is shutting down, and the request had not begun; ask another")
    if isinstance(error, RequestError) and call.is_late:
        return ApiError(408, str(error))
    if isinstance(error, RequestError) and (not call.has_begun or _is_of_grammar(call, error)):
        return refused(error, field_of(str(error)))
    return failed(error or VllmLiteError("the request failed"))


def _is_of_grammar(call: Call, error: RequestError) -> bool:
    """Whether the engine ended a call because of its grammar; errors travel as sentences."""
    has_grammar = any(stream.params.grammar is not None for stream in call.streams)
    return has_grammar and re.match(r"(its|the) grammar\b", str(error)) is not None
