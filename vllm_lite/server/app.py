"""The routes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.client.prompt import PromptLike, check_room
from vllm_lite.client.stream import RequestStream, StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime import log
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.response import Answer
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.gate import OPEN_PATHS, Gate
from vllm_lite.server.live_requests import Requests, as_json
from vllm_lite.server.metrics import PATH as METRICS_PATH
from vllm_lite.server.metrics import Metrics, Tally
from vllm_lite.server.openai import bodies, openapi
from vllm_lite.server.openai.answers import ChatShape, CompletionShape, TokensShape
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody
from vllm_lite.server.openai.errors import ApiError, error_body, refused
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.prompts import SLICE_TOKENS, Check, Prompts, text_of

MAX_PROMPT_CANDIDATES = 1 << 18
"""In the `prompt_logprobs` of one answer. As many take 100 MB, and 0.5 s of a thread."""
_PROMPT_FIELDS = {"cmpl": "prompt", "chatcmpl": "messages", "gen": "token_ids"}
"""By what ids begin with: where the prompt stands in the body."""

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
        self, config: ServeConfig, model: Model, factory: StreamFactory, prompts: Prompts, requests: Requests
    ) -> None:
        self._config = config
        self._model = model
        self._factory = factory
        self._prompts = prompts
        self._requests = requests
        self._calls = requests.calls
        self._reader = requests.reader
        self._spelling = Spelling(factory.tokenizer)

    # ---- generation

    async def completions(self, request: Request) -> Response:
        body, headers = await self._reader.read(request, CompletionBody)
        name = self._model.name(body.model)
        self._calls.check()
        params = bodies.sampling(body, self._model.defaults, _completion_changes(body))
        prompts = await self._prompts.of_completion(body, params, request)
        if len(prompts) * params.n > bodies.MAX_CHOICES:
            raise ApiError(400, f"n times the prompts are {len(prompts) * params.n}; at most {bodies.MAX_CHOICES}", "n")
        call = await self._call("cmpl", body.request_id, prompts, params, request)
        echo = await self._texts(call) if body.echo else None
        shape = CompletionShape(call, body, name, self._spelling, echo=echo)
        call.shape_fork = lambda fork, asked: CompletionShape(
            fork, asked.over(body), name, self._spelling, echo=echo and echo * len(fork.streams)
        )
        return Answer(call, shape, self._calls.run, stream=bool(body.stream), headers=headers)

    async def chat(self, request: Request) -> Response:
        body, headers = await self._reader.read(request, ChatBody)
        name = self._model.name(body.model)
        self._calls.check()
        changes = _chat_changes(body)
        params = bodies.sampling(body, {"max_tokens": None, **self._model.defaults}, changes)
        prompt = await self._prompts.of_chat(body, params, request)
        call = await self._call("chatcmpl", body.request_id, [prompt], params, request)
        last = body.messages[-1]
        echo = text_of(last) if body.echo and last.role == "assistant" else ""
        shape = ChatShape(call, body, name, self._spelling, echo=echo)
        call.shape_fork = lambda fork, asked: ChatShape(fork, asked.over(body), name, self._spelling, echo=echo)
        return Answer(call, shape, self._calls.run, stream=bool(body.stream), headers=headers)

    async def generate(self, request: Request) -> Response:
        body, headers = await self._reader.read(request, GenerateBody)
        name = self._model.name(body.model)
        self._calls.check()
        given = body.sampling_params
        changes: dict[str, Any] = {"logprobs": given.logprobs, "detokenize": bool(given.stop)}
        changes |= {name: value for name in ("cache_salt", "priority") if (value := getattr(body, name)) is not None}
        params = bodies.sampling(given, self._model.defaults, changes)
        call = await self._call("gen", body.request_id, [body.token_ids], params, request)
        shape = TokensShape(call, body, name, self._spelling)
        call.shape_fork = lambda fork, asked: TokensShape(fork, asked.over(body), name, self._spelling)
        return Answer(call, shape, self._calls.run, stream=bool(body.stream), headers=headers)

    async def _call(
        self,
        kind: str,
        request_id: str | None,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        request: Request,
    ) -> Call:
        """Its streams, not started. Raises ApiError."""
        call_id = await self._requests.new_id(kind, request_id)
        ids = self._calls.stream_ids(call_id, len(prompts))

        def made(check: Check) -> list[RequestStream]:
            streams = []
            for prompt, name in zip(prompts, ids, strict=True):
                check()
                streams.append(self._factory.make(prompt, params, name, check))
            return streams

        try:
            streams = await self._prompts.tokenized(made, prompts, request)
            if params.max_tokens != self._model.defaults.get("max_tokens"):  # the model's own is cut without a word
                check_room([stream.prompt for stream in streams], params.max_tokens, self._model.max_model_len)
        except RequestError as error:
            raise refused(error, bodies.field_of(str(error), _PROMPT_FIELDS[kind])) from error
        _check_scores(streams)
        if self._config.enable_log_requests:
            for stream in streams:
                logger.info("%s: tokens %s, %s", stream.request_id, stream.prompt.token_ids, params)
        return Call(call_id, streams)

    async def _texts(self, call: Call) -> list[str]:
        """Of its prompts."""
        texts = []
        for stream in call.streams:
            skip, text, ids = stream.params.skip_special_tokens, stream.prompt.text, stream.prompt.token_ids
            texts.append(await self._prompts.decode(ids, skip_special_tokens=skip) if text is None else text)
            await asyncio.sleep(0)
        return texts

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._reader.read(request, TokenizeBody)
        self._model.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either a prompt or messages", "prompt")
        if body.prompt is None:
            ids = await self._prompts.of_chat(body, None, request)
        else:
            is_special = body.add_special_tokens is not False
            ids = await self._prompts.of_text(body.prompt, request, add_special_tokens=is_special)
        words, spelled = self._prompts.tokenizer, None
        if body.return_token_strs and words is not None:
            spelled = []
            for place in range(0, len(ids), SLICE_TOKENS):
                spelled += [words.token(token) for token in ids[place : place + SLICE_TOKENS]]
                await asyncio.sleep(0)
        length = self._model.max_model_len
        return as_json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": spelled}, headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._reader.read(request, DetokenizeBody)
        self._model.name(body.model)
        text = await self._prompts.decode(body.tokens, skip_special_tokens=False)
        return as_json({"prompt": text}, headers)

    # ---- what is served, and whether

    async def models(self, _: Request) -> Response:
        return as_json({"object": "list", "data": [self._model.card(name) for name in self._model.names]})

    async def model(self, request: Request) -> Response:
        return as_json(self._model.card(self._model.name(request.path_params["model"])))

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
        return as_json({"version": __version__})

    async def openapi(self, _: Request) -> Response:
        return as_json(openapi.document())

    async def docs(self, _: Request) -> Response:
        return Response(openapi.PAGE, media_type="text/html")


def _check_scores(streams: Sequence[RequestStream]) -> None:
    """Raises ApiError for more logprobs of prompts than one answer tells."""
    wanted = streams[0].params.prompt_logprobs
    if wanted is None:
        return
    length = sum(len(stream.prompt.token_ids) for stream in streams)
    if length * (wanted + 1) > MAX_PROMPT_CANDIDATES:
        text = f"prompt_logprobs of {wanted} for {length} prompt tokens are {length * (wanted + 1)} candidates"
        raise ApiError(400, f"{text}; an answer has at most {MAX_PROMPT_CANDIDATES}", "prompt_logprobs")


def _completion_changes(body: CompletionBody) -> dict[str, Any]:
    """What a completion calls by other names than SamplingParams. Raises ApiError."""
    changes: dict[str, Any] = {"logprobs": body.logprobs}
    if body.only_scores:  # the engine always draws a token: the shape leaves it out
        changes |= {"max_tokens": 1, "min_tokens": 0}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise ApiError(400, "echo with logprobs is not supported in a stream", "echo")
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


# ---- the application


def build(api: Api, requests: Requests, config: ServeConfig, keys: Keys, metrics: Metrics) -> Starlette:
    """The ASGI application."""
    gets: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", api.health),
        ("/health/live", api.live),
        ("/health/ready", api.health),
        ("/ping", api.health),
        ("/version", api.version),
        (METRICS_PATH, metrics.get),
        ("/openapi.json", api.openapi),
        ("/docs", api.docs),
        ("/v1/models", api.models),
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
    routes += [Route(path, requests.reader.holding(method), methods=["POST"]) for path, method in posts]
    routes.append(Route("/ping", api.health, methods=["POST"]))
    routes += requests.routes()
    routes.append(Route("/reset_prefix_cache", requests.reset_prefix_cache, methods=["POST"]))
    metrics.know(routes)
    open_paths = OPEN_PATHS | {METRICS_PATH} if config.public_metrics else OPEN_PATHS
    gate = Middleware(Gate, keys=keys, is_local=config.is_local, open_paths=open_paths)
    middleware = [Middleware(Tally, metrics=metrics), gate]
    if config.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
        middleware.insert(0, cors)
    return _application(routes, middleware)


def build_private(requests: Requests) -> Starlette:
    """What the other servers of a family ask of one."""
    return _application(requests.routes(), [])


def _application(routes: list[Route], middleware: list[Middleware]) -> Starlette:
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
