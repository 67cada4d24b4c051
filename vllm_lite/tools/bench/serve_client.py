"""One request of `bench serve`: its body, and the arrival times of its answer."""

import asyncio
import time
from collections.abc import Mapping, MutableSequence
from itertools import pairwise
from typing import Any

import msgspec

from vllm_lite.tools.bench.serve_datasets import LoadItem
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
    "vllm-pooling": "/pooling",
}
"""Paths by --backend."""
NO_IDS = "has no token_ids in its answer, with which this prompt begins; give --tokenizer FOLDER"
MAX_ERROR_CHARS = 500


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning or self.reasoning_content or ""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Pooled(msgspec.Struct):
    """An answer with vectors, which is not streamed."""

    usage: _Usage


_decode_pooled = msgspec.json.Decoder(_Pooled).decode
_decode = msgspec.json.Decoder(_Chunk).decode


class Outcome:
    """The outcome of a request, filled from the events of its stream. Times are perf_counter's, lengths in tokens;
    `error` is "" for a completed request."""

    __slots__ = ("chunks_s", "error", "input_len", "is_complete", "output_len", "start_s", "texts", "token_ids")

    def __init__(self, input_len: int) -> None:
        self.start_s = 0.0
        self.chunks_s: MutableSequence[float] = []
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        """Token ids of the answer, if the request asks for them."""
        self.input_len = input_len
        self.output_len = 0
        self.is_complete = False
        self.error = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Time from the request to the first chunk."""
        return self.chunks_s[0] - self.start_s if self.chunks_s else 0.0

    @property
    def latency_s(self) -> float:
        return self.chunks_s[-1] - self.start_s if self.chunks_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Times between successive chunks. A chunk may have several tokens, and one read several chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]

    def take(self, events: list[bytes], now_s: float) -> None:
        """Process the events of one read. Raises HttpError for an event that is not a chunk."""
        for data in events:
            if data == b"[DONE]":
                self.is_complete = True
                continue
            try:
                chunk = _decode(data)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                raise HttpError(f"an event is not a chunk of a completion: {error}") from error
            if chunk.error is not None:
                raise HttpError(f"error in the stream: {_message(chunk.error)}")
            if chunk.choices:
                self._take_choice(chunk.choices[0], now_s)
            if chunk.usage is not None:
                self.input_len = chunk.usage.prompt_tokens or self.input_len
                self.output_len = chunk.usage.completion_tokens

    def unanswered(self) -> "Outcome":
        """The outcome of a request that was to continue this failed one."""
        outcome = Outcome(0)
        outcome.error = f"the turn before it {f'failed: {self.error}' if self.error else NO_IDS}"[:MAX_ERROR_CHARS]
        return outcome

    def take_pooled(self, data: bytes) -> None:
        """Process an answer with vectors. Raises HttpError if it is not one."""
        try:
            self.input_len = _decode_pooled(data).usage.prompt_tokens or self.input_len
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise HttpError(f"the answer has no vectors: {error}") from error
        self.chunks_s.append(time.perf_counter())
        self.is_complete = True

    def _take_choice(self, choice: _Choice, now_s: float) -> None:
        delta = choice.delta
        text = (choice.text if delta is None else delta.text) or ""
        if delta is not None and delta.role and not text and choice.finish_reason is None:
            return  # the first chunk of a chat, without tokens
        self.chunks_s.append(now_s)
        self.texts.append(text)
        self.token_ids += choice.token_ids or ()  # vLLM writes null unless they were asked for
        if choice.finish_reason is not None:
            self.is_complete = True


class Endpoint:
    """Sends requests to one endpoint, with the same `settings`: model, sampling and other fields of the body."""

    def __init__(self, client: HttpClient, endpoint: str, settings: Mapping[str, Any], *, timeout_s: float) -> None:
        self._client = client
        self._endpoint = endpoint
        self._is_chat = endpoint.rstrip("/").endswith("chat/completions")
        self._is_pooled = endpoint.rstrip("/").endswith(("embeddings", "pooling"))
        self._settings = {**settings, "stream": True, "stream_options": {"include_usage": True}}
        if self._is_pooled:
            self._settings = {"model": settings.get("model"), "truncate_prompt_tokens": -1}
        self._timeout_s = timeout_s

    async def send(self, request: LoadItem) -> Outcome:
        """Send one request. Errors of the server are in the outcome, and never raised."""
        outcome = Outcome(request.input_len)
        body = msgspec.json.encode(self.body(request))
        outcome.start_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._is_pooled:
                    outcome.take_pooled(await self._client.post(self._endpoint, body))
                else:
                    await self._client.stream(self._endpoint, body, outcome.take)
        except TimeoutError:
            outcome.error = f"no end after {self._timeout_s:g} s"
        except HttpError as error:
            if error.status or not outcome.is_complete:  # a server may end its answer by closing the connection
                outcome.error = str(error)[:MAX_ERROR_CHARS]
        if not outcome.error and not outcome.is_complete:
            outcome.error = "the stream ended without [DONE]"
        if not outcome.error and not outcome.chunks_s:
            outcome.error = "the stream held no token"
        outcome.texts = [outcome.text]  # one string takes less memory than its pieces
        return outcome

    def body(self, request: LoadItem) -> dict[str, Any]:
        if self._is_pooled:
            return {"input": request.prompt, "encoding_format": "base64", **self._settings}
        if self._is_chat:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
            limit = "max_completion_tokens"
        else:
            prompt, limit = {"prompt": request.prompt}, "max_tokens"
        return {**prompt, limit: request.output_len, **self._settings}

    async def model(self) -> str:
        """The server's first model. Raises HttpError."""
        data = await self._client.get("/v1/models")
        try:
            return str(msgspec.json.decode(data)["data"][0]["id"])
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError) as error:
            raise HttpError("the server's /v1/models names no model; give --model") from error


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
