"""A call as an HTTP response, whole or streamed. Whichever way it ends, nothing of it is left in the engine.

A stream's status is decided by its first event: what the engine refuses is an error like any other, not a stream.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.errors import RequestError, VllmLiteError
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.calls.threads import until_gone
from vllm_lite.server.openai.answers import Shape
from vllm_lite.server.openai.bodies import field_of
from vllm_lite.server.openai.errors import ApiError, failed, refused

PING = b": ping\n\n"
PING_S = 15.0
"""A stream is never silent for longer: proxies end connections that are."""
MANY_TOKENS = 256
"""With logprobs, in one piece of a stream."""


class Answer(Response):
    """Runs `call` when the response is asked for; aborts it if the client goes."""

    def __init__(
        self,
        call: Call,
        shape: Shape,
        run: Callable[[Call], AbstractContextManager[None]],
        *,
        stream: bool,
        headers: dict[str, str],
    ) -> None:
        """`run` starts the call in the engine, and ends what is left of it."""
        kind = "text/event-stream; charset=utf-8" if stream else "application/json"
        super().__init__(headers={"content-type": kind, **headers})
        self._call = call
        self._shape = shape
        self._run = run
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        call = self._call
        watch = asyncio.ensure_future(until_gone(receive))
        watch.add_done_callback(lambda _: call.leave())
        try:
            with self._run(call):
                await (self._tell_pieces(send) if self._stream else self._tell_whole(send))
        finally:
            watch.cancel()

    async def _tell_whole(self, send: Send) -> None:
        call = self._call
        while not call.finished and not call.gone and call.error is None and not call.was_cut:
            await call.wait()
        if call.gone:
            return
        if call.error is not None or call.was_cut:
            raise _as_answer(call)
        body = await self._made(self._shape.whole, has_logprobs(call))
        headers = [*self._own_headers(), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _tell_pieces(self, send: Send) -> None:
        call, shape = self._call, self._shape
        await call.wait()
        if call.error is not None or call.was_cut:
            raise _as_answer(call)
        if call.gone:
            return
        headers = [*self._own_headers(), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = shape.opening()
        while not call.gone:
            ended = call.finished or call.error is not None
            data += await self._pieces(list(call.news()))
            if ended:
                data += shape.closing() if call.error is None else b"data: " + _as_answer(call).body() + b"\n\n"
            now_s = time.monotonic()
            if not data and now_s - call.quiet_since_s >= PING_S:
                data = PING
            if data:
                call.quiet_since_s = now_s
                await send({"type": "http.response.body", "body": data, "more_body": not ended})
            if ended:
                return
            data = b""
            await call.wait()

    async def _pieces(self, all_news: list[tuple[Choice, CompletionOutput]]) -> bytes:
        """The news of some choices. They are many at once of one that has nothing to show before its end."""
        many = sum(len(news.logprobs or ()) for _, news in all_news) > MANY_TOKENS
        return await self._made(
            lambda: b"".join([self._shape.piece(choice, news) for choice, news in all_news]), is_long=many
        )

    async def _made(self, make: Callable[[], bytes], is_long: bool) -> bytes:
        """What `make` returns, in a thread if that takes long: the candidates of one token take 20 us or more."""
        return await asyncio.to_thread(make) if is_long else make()

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        return [header for header in self.raw_headers if header[0] != b"content-length"]


def has_logprobs(call: Call) -> bool:
    params = call.streams[0].params
    return params.logprobs is not None or params.prompt_logprobs is not None


def _as_answer(call: Call) -> ApiError:
    """The error of a call: the request's fault only if nothing was generated, or if it wanted to be done by now."""
    error = call.error
    if error is None and call.was_cut:
        return ApiError(503, "the server is shutting down, and the request had not begun; ask another")
    if isinstance(error, RequestError) and call.is_late:
        return ApiError(408, str(error))
    if isinstance(error, RequestError) and not call.has_begun:
        return refused(error, field_of(str(error)))
    return failed(error or VllmLiteError("the request failed"))
