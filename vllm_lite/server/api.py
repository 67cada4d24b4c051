"""The routes."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite import __version__, log
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.stream import RequestStream, StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server import bodies, openapi
from vllm_lite.server.answer import Answer
from vllm_lite.server.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, Sampling, TokenizeBody
from vllm_lite.server.call import Call
from vllm_lite.server.calls import Calls
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.errors import ApiError, error_body, refused
from vllm_lite.server.gate import Gate
from vllm_lite.server.logprobs import Spelling
from vllm_lite.server.prompts import LONG_TEXT_CHARS, Prompts, text_of
from vllm_lite.server.shapes import ChatShape, CompletionShape, TokensShape

DRAIN_S = 2.0
"""How long a body that is refused is still read, so that its client comes to read the answer."""

_PROMPT_FIELDS = {"cmpl": "prompt", "chatcmpl": "messages", "gen": "token_ids"}
"""By what ids begin with: where the prompt stands in the body."""

B = TypeVar("B", bound=msgspec.Struct)
logger = log.get(__name__)


class Model:
    """What is served, and under which names."""

    def __init__(self, names: tuple[str, ...], path: str | None, max_model_len: int, defaults: dict[str, Any]) -> None:
        """`path` is another name that is taken but not shown; `defaults` are SamplingParams where a request says
        nothing."""
        self.names = names
        self._taken = {*names, path}
        self.max_model_len = max_model_len
        self.defaults = defaults
        self._created = int(time.time())

    def name(self, wanted: str | None) -> str:
        """The name to answer with. Raises ApiError for a model that is not served."""
        if wanted not in self._taken and wanted is not None:
            raise ApiError(
                404, f"the model {wanted!r} does not exist; this server has {', '.join(self.names)}", "model"
            )
        return wanted or self.names[0]

    def card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm_lite",
            "root": self.names[0],
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }


class Api:
    """One method for each route."""

    def __init__(
        self, config: ServeConfig, model: Model, factory: StreamFactory, prompts: Prompts, calls: Calls
    ) -> None:
        self._config = config
        self._model = model
        self._factory = factory
        self._prompts = prompts
        self._calls = calls
        self._spelling = Spelling(factory.tokenizer)

    # ---- generation

    async def completions(self, request: Request) -> Response:
        body, headers = await self._read(request, CompletionBody)
        name = self._model.name(body.model)
        self._calls.check()
        params = bodies.sampling(body, self._model.defaults, _completion_changes(body))
        prompts = await self._prompts.of_completion(body)
        if len(prompts) * params.n > bodies.MAX_CHOICES:
            raise ApiError(400, f"n times the prompts are {len(prompts) * params.n}; at most {bodies.MAX_CHOICES}", "n")
        call = await self._call("cmpl", body.request_id, prompts, params)
        echo = [self._text(stream) for stream in call.streams] if body.echo else None
        shape = CompletionShape(call, body, name, self._spelling, echo=echo)
        return Answer(call, shape, self._calls.run, stream=bool(body.stream), headers=headers)

    async def chat(self, request: Request) -> Response:
        body, headers = await self._read(request, ChatBody)
        name = self._model.name(body.model)
        self._calls.check()
        changes = _chat_changes(body)
        params = bodies.sampling(body, {"max_tokens": None, **self._model.defaults}, changes)
        call = await self._call("chatcmpl", body.request_id, [await self._prompts.of_chat(body)], params)
        last = body.messages[-1]
        echo = text_of(last) if body.echo and last.role == "assistant" else ""
        shape = ChatShape(call, body, name, self._spelling, echo=echo)
        return Answer(call, shape, self._calls.run, stream=bool(body.stream), headers=headers)

    async def generate(self, request: Request) -> Response:
        body, headers = await self._read(request, GenerateBody)
        name = self._model.name(body.model)
        self._calls.check()
        given = body.sampling_params
        changes: dict[str, Any] = {"logprobs": given.logprobs, "detokenize": bool(given.stop)}
        changes |= {name: value for name in ("cache_salt", "priority") if (value := getattr(body, name)) is not None}
        params = bodies.sampling(given, self._model.defaults, changes)
        call = await self._call("gen", body.request_id, [body.token_ids], params)
        shape = TokensShape(call, body, name, self._spelling)
        return Answer(call, shape, self._calls.run, stream=bool(body.stream), headers=headers)

    async def abort(self, request: Request) -> Response:
        """Its client is told so."""
        call = self._calls.get(request.path_params["request_id"])
        self._calls.relay.abort(call)
        return _json({"id": call.id, "object": "request", "deleted": True})

    async def state(self, request: Request) -> Response:
        """How far a request is."""
        call = self._calls.get(request.path_params["request_id"])
        num_tokens = sum(stream.num_tokens for stream in call.streams)
        usage = {"prompt_tokens": call.num_prompt_tokens, "completion_tokens": num_tokens}
        state = "running" if num_tokens else "waiting"
        return _json({"id": call.id, "object": "request", "created": call.created, "state": state, "usage": usage})

    async def _call(
        self, kind: str, request_id: str | None, prompts: Sequence[PromptLike], params: SamplingParams
    ) -> Call:
        """Its streams, not started. Raises ApiError."""
        call_id = f"{kind}-{request_id or os.urandom(12).hex()}"
        streams: list[RequestStream] = []
        make = self._factory.make
        for place, prompt in enumerate(prompts):
            stream_id = call_id if len(prompts) == 1 else f"{call_id}-{place}"
            try:
                if isinstance(prompt, str) and len(prompt) > LONG_TEXT_CHARS:
                    streams.append(await asyncio.to_thread(make, prompt, params, stream_id))
                else:
                    streams.append(make(prompt, params, stream_id))
            except RequestError as error:
                field = bodies.field_of(str(error), _PROMPT_FIELDS[kind])
                raise refused(error, field) from error
        if self._config.enable_log_requests:
            for stream in streams:
                logger.info("%s: tokens %s, %s", stream.request_id, stream.prompt.token_ids, params)
        return Call(call_id, streams)

    def _text(self, stream: RequestStream) -> str:
        """Of its prompt."""
        skip, prompt = stream.params.skip_special_tokens, stream.prompt
        return self._prompts.decode(prompt.token_ids, skip_special_tokens=skip) if prompt.text is None else prompt.text

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._read(request, TokenizeBody)
        self._model.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either a prompt or messages", "prompt")
        if body.prompt is not None:
            ids = await self._prompts.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            text = self._prompts.render(body)
            ids = await self._prompts.encode(text, add_special_tokens=bool(body.add_special_tokens))
        words = self._prompts.tokenizer
        spelled = [words.token(token) for token in ids] if body.return_token_strs and words is not None else None
        length = self._model.max_model_len
        return _json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": spelled}, headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._read(request, DetokenizeBody)
        self._model.name(body.model)
        return _json({"prompt": self._prompts.decode(body.tokens, skip_special_tokens=False)}, headers)

    # ---- what is served, and whether

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model.card(name) for name in self._model.names]})

    async def model(self, request: Request) -> Response:
        return _json(self._model.card(self._model.name(request.path_params["model"])))

    async def health(self, _: Request) -> Response:
        """200 only if a request would be served: the engine's loop turns."""
        await self._calls.probe()
        return Response()

    async def live(self, _: Request) -> Response:
        """200 as long as there is something to wait for."""
        if self._calls.death is not None:
            raise ApiError(503, self._calls.death)
        return Response()

    async def version(self, _: Request) -> Response:
        return _json({"version": __version__})

    async def load(self, _: Request) -> Response:
        return _json({"server_load": len(self._calls)})

    async def openapi(self, _: Request) -> Response:
        return _json(openapi.document())

    async def docs(self, _: Request) -> Response:
        return Response(openapi.PAGE, media_type="text/html")

    # ---- bodies

    async def _read(self, request: Request, kind: type[B]) -> tuple[B, dict[str, str]]:
        """The body, and the header that says what of it is ignored. Raises ApiError."""
        media = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, f"the body must be application/json, got {media!r}")
        body, ignored = bodies.read(await self._receive(request), kind)
        wanted = body.sampling_params if isinstance(body, GenerateBody) else body
        if isinstance(wanted, Sampling) and wanted.prompt_logprobs is not None and getattr(body, "stream", None):
            raise ApiError(400, "prompt_logprobs are not told in a stream", "prompt_logprobs")
        return body, bodies.warning(ignored)

    async def _receive(self, request: Request) -> bytes:
        limit, timeout_s = self._config.max_request_bytes, self._config.body_timeout_s
        length = request.headers.get("content-length", "0")
        data = bytearray()
        too_long = length.isdecimal() and int(length) > limit
        try:
            async with asyncio.timeout(DRAIN_S if too_long else timeout_s) as patience:
                async for piece in _pieces(request):
                    if too_long:
                        continue
                    data += piece
                    if len(data) > limit:
                        too_long = True
                        data.clear()
                        patience.reschedule(asyncio.get_running_loop().time() + DRAIN_S)
        except TimeoutError as error:
            if not too_long:
                text = f"the body must come within {timeout_s:g} s"
                raise ApiError(408, text, headers={"Connection": "close"}) from error
        if too_long:
            raise ApiError(413, f"a body may have at most {limit} bytes", headers={"Connection": "close"})
        return bytes(data)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ApiError if the client goes."""
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ApiError(400, "the client has gone")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _completion_changes(body: CompletionBody) -> dict[str, Any]:
    """What a completion calls by other names than SamplingParams. Raises ApiError."""
    changes: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        if "prompt_logprobs" not in bodies.SAMPLING or body.stream:
            raise ApiError(400, "echo with logprobs is not supported" + " in a stream" * bool(body.stream), "echo")
        changes["prompt_logprobs"] = body.logprobs
    return changes


def _chat_changes(body: ChatBody) -> dict[str, Any]:
    """What a chat calls by other names than SamplingParams."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        changes["max_tokens"] = body.max_completion_tokens
    return changes


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")


# ---- the application


def build(api: Api, config: ServeConfig, keys: tuple[str, ...]) -> Starlette:
    """The ASGI application."""
    gets: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", api.health),
        ("/health/live", api.live),
        ("/health/ready", api.health),
        ("/ping", api.health),
        ("/version", api.version),
        ("/load", api.load),
        ("/openapi.json", api.openapi),
        ("/docs", api.docs),
        ("/v1/models", api.models),
        ("/v1/requests/{request_id}", api.state),
        ("/v1/models/{model:path}", api.model),
    ]
    posts = [
        ("/v1/completions", api.completions),
        ("/v1/chat/completions", api.chat),
        ("/inference/v1/generate", api.generate),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
    ]
    routes = [Route(path, method, methods=["GET"]) for path, method in gets]
    routes += [Route(path, method, methods=["POST"]) for path, method in posts]
    routes.append(Route("/ping", api.health, methods=["POST"]))
    routes.append(Route("/v1/requests/{request_id}", api.abort, methods=["DELETE"]))
    middleware = [Middleware(Gate, keys=keys)]
    if config.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_fault}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to where the Host header says
    return app


async def _on_api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {request.scope['path']}: {error.detail}"
    return Response(
        error_body(error.status_code, text), error.status_code, dict(error.headers or {}), "application/json"
    )


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault of ours: its traceback goes to the log, not to the client."""
    del error
    return Response(error_body(500, "the server failed; its log says why"), 500, media_type="application/json")
