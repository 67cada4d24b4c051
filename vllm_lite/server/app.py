"""The routes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
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
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.auth import OPEN_PATHS, AuthMiddleware
from vllm_lite.server.http.paths import PathMiddleware
from vllm_lite.server.live_requests import LiveRequests, as_json
from vllm_lite.server.metrics import PATH as METRICS_PATH
from vllm_lite.server.metrics import Metrics
from vllm_lite.server.openai import bodies, forms, openapi
from vllm_lite.server.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    FormFields,
    GenerateBody,
    TokenizeBody,
)
from vllm_lite.server.openai.chunks import AnswerStyle
from vllm_lite.server.openai.errors import ApiError, refused
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.forms import ToolsWanted
from vllm_lite.server.openai.grammars import Grammars
from vllm_lite.server.openai.parsing import Parsing
from vllm_lite.server.openai.prompts import SLICE_TOKENS, Check, Prompts, text_of
from vllm_lite.server.pages import pages

MAX_PROMPT_CANDIDATES = 1 << 18
"""In the `prompt_logprobs` of one answer. As many take 100 MB, and 0.5 s of a thread."""
V1 = "/v1"
DOCS_PATHS = frozenset(pages.PAGES) | {"/openapi.json", "/version"}
NO_TOOLS = "tools: not shown to the model, whose chat template takes none"
_PROMPT_FIELDS = {"cmpl": "prompt", "chatcmpl": "messages", "gen": "token_ids"}
"""The field of the body that the prompt stands in, by the kind of the call."""

B = TypeVar("B", CompletionBody, ChatBody, GenerateBody)

logger = log.get(__name__)


@dataclass
class ServedModel:
    """What is served, and under which names. `path` is another name that is taken but not shown; `defaults` are
    SamplingParams where a request says nothing; `root` is what the names stand for."""

    names: tuple[str, ...]
    path: str | None
    max_model_len: int
    defaults: dict[str, Any]
    formats: dict[str, str | None] = field(default_factory=dict)
    root: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def name(self, wanted: str | None) -> str:
        """Return the name to answer with. Raises ApiError for a model that is not served."""
        if wanted is not None and wanted not in (*self.names, self.path):
            raise ApiError(
                404, f"the model {wanted!r} does not exist; this server has {', '.join(self.names)}", "model"
            )
        return wanted or self.names[0]

    def card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "vllm_lite",
            "root": self.root or self.names[0],
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
            "vllm_lite": self.formats,
        }


class Asked(NamedTuple, Generic[B]):
    """A decoded body that asks for tokens; `headers` and the name of the `model` are for its answer."""

    request: Request
    body: B
    headers: dict[str, str]
    model: str


class ApiRoutes:
    """Answers all routes but those of LiveRequests and Metrics: one method for each."""

    def __init__(
        self,
        config: ServeConfig,
        model: ServedModel,
        factory: StreamFactory,
        prompts: Prompts,
        live: LiveRequests,
        formats: Formats | None = None,
    ) -> None:
        """`formats` say how the model writes calls and reasoning; None for one without a tokenizer."""
        self._config = config
        self._model = model
        self._factory = factory
        self._prompts = prompts
        self._live = live
        self._formats = formats
        self._grammars = Grammars(formats)
        self._has_warned = False
        self._calls = live.calls
        self._reader = live.reader

    # ---- generation

    async def completions(self, request: Request) -> Response:
        asked = await self._read(request, CompletionBody)
        body = asked.body
        params = bodies.sampling(body, self._model.defaults, _completion_changes(body))
        params = await self._grammars.held(_budgeted(params, body), forms.form_of(body), None, request)
        prompts = await self._prompts.of_completion(body, params, request)
        if (infill := self._prompts.infill(body)) is not None and not params.ignore_eos:
            params = bodies.changed(params, stop_token_ids=[*params.stop_token_ids, *infill.ends])
        if len(prompts) * params.n > bodies.MAX_CHOICES:
            raise ApiError(400, f"n times the prompts are {len(prompts) * params.n}; at most {bodies.MAX_CHOICES}", "n")
        return await self._generate(asked, prompts, params, echo=None if body.echo else ())

    async def chat(self, request: Request) -> Response:
        asked = await self._read(request, ChatBody)
        body = asked.body
        params = bodies.sampling(body, {"max_tokens": None, **self._model.defaults}, _chat_changes(body))
        tools, form = forms.tools_of(body), forms.form_of(body)
        params = await self._grammars.held(_budgeted(params, body), form, tools, request)
        prompt = await self._prompts.of_chat(body, params, request)
        parsing = None
        if self._formats is not None:
            parsing = _parsing(self._formats, body, tools)
            params = self._thinking(params, prompt, is_forced=parsing is not None and parsing.is_forced)
        last = body.messages[-1]
        echo = (text_of(last),) if body.echo and last.role == "assistant" else ()
        headers = {**asked.headers, **self._unseen(tools, asked.headers)}
        return await self._generate(asked._replace(headers=headers), [prompt], params, echo, parsing)

    async def generate(self, request: Request) -> Response:
        asked = await self._read(request, GenerateBody)
        body, given = asked.body, asked.body.sampling_params
        changes: dict[str, Any] = {"logprobs": given.logprobs, "detokenize": bool(given.stop)}
        changes |= {name: value for name in ("cache_salt", "priority") if (value := getattr(body, name)) is not None}
        params = bodies.sampling(given, self._model.defaults, changes)
        params = await self._grammars.held(_budgeted(params, given), forms.form_of(given), None, request)
        return await self._generate(asked, [body.token_ids], params)

    async def _read(self, request: Request, kind: type[B]) -> Asked[B]:
        """Read the body of a request that may start. Raises ApiError."""
        body, headers = await self._reader.read(request, kind)
        name = self._model.name(body.model)
        self._calls.check()
        return Asked(request, body, headers, name)

    def _thinking(self, params: SamplingParams, prompt: Sequence[int], *, is_forced: bool) -> SamplingParams:
        """Let what holds the output begin behind its thinking."""
        if self._formats is None or (params.grammar is None and params.thinking_token_budget is None):
            return params
        thinking = self._formats.thinking(prompt, is_forced=is_forced)
        return params if thinking is None else bodies.changed(params, thinking=thinking)

    def _unseen(self, tools: ToolsWanted | None, headers: dict[str, str]) -> dict[str, str]:
        """The header that says so where the model is not shown the tools that it may call."""
        if tools is None or self._prompts.shows_tools:
            return {}
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a request has tools, and the model's chat template shows it none: %s", NO_TOOLS)
        return {"Warning": ", ".join([*headers.values(), f'299 vllm-lite "{NO_TOOLS}"'])}

    async def _generate(
        self,
        asked: Asked[B],
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        echo: tuple[str, ...] | None = (),
        parsing: Parsing | None = None,
    ) -> Response:
        """The response that generates. `echo` stands before each prompt's answers; None for the prompt's own text.
        Raises ApiError."""
        style, body = AnswerStyle.of(asked.body, asked.model), asked.body
        call_id = await self._live.new_id(style.kind, body.request_id)
        streams = await self._streams(call_id, style.kind, prompts, params, asked.request)
        echo = tuple(await self._texts(streams)) if echo is None else echo
        call = Call(call_id, streams, msgspec.structs.replace(style, echo=echo, parsing=parsing))
        return self._live.respond(call, asked.request, stream=body.stream, headers=asked.headers)

    async def _streams(
        self, call_id: str, kind: str, prompts: Sequence[PromptLike], params: SamplingParams, request: Request
    ) -> list[RequestStream]:
        """Make the streams of a call, without starting them. Raises ApiError."""
        ids = self._calls.stream_ids(call_id, len(prompts))

        def made(check: Check) -> list[RequestStream]:
            streams = []
            for prompt, name in zip(prompts, ids, strict=True):
                check()
                streams.append(self._factory.make(prompt, params, name, check))
            return streams

        try:
            streams = await self._prompts.tokenized(made, prompts, request)
            if params.max_tokens != self._model.defaults.get("max_tokens"):  # the model's own is cut without an error
                check_room([stream.prompt for stream in streams], params.max_tokens, self._model.max_model_len)
        except RequestError as error:
            raise refused(error, bodies.field_of(str(error), _PROMPT_FIELDS[kind])) from error
        _check_scores(streams)
        if self._config.enable_log_requests:
            for stream in streams:
                logger.info("%s: tokens %s, %s", stream.request_id, stream.prompt.token_ids, params)
        return streams

    async def _texts(self, streams: Sequence[RequestStream]) -> list[str]:
        """Return the prompts of `streams` as texts."""
        texts = []
        for stream in streams:
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
            ids = await self._prompts.of_text(body.prompt, is_special, None, request, "prompt")
        words, spelled = self._prompts.tokenizer, None
        if body.return_token_strs and words is not None:
            spelled = []
            for start in range(0, len(ids), SLICE_TOKENS):
                spelled += [words.token(token) for token in ids[start : start + SLICE_TOKENS]]
                await asyncio.sleep(0)
        counts = {"count": len(ids), "max_model_len": self._model.max_model_len}
        return as_json({**counts, "tokens": ids, "token_strs": spelled}, headers)

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
        """200 only if a request would be served: the engine's loop answers."""
        await self._calls.probe()
        return Response()

    async def live(self, _: Request) -> Response:
        """200 as long as the engine lives, even if it does not answer now."""
        if self._calls.death is not None:
            raise ApiError(503, self._calls.death)
        return Response()

    async def version(self, _: Request) -> Response:
        return as_json({"version": __version__})

    async def openapi(self, _: Request) -> Response:
        return as_json(openapi.document())


def _check_scores(streams: Sequence[RequestStream]) -> None:
    """Raises ApiError for more logprobs of prompts than one answer holds."""
    wanted = streams[0].params.prompt_logprobs
    if wanted is None:
        return
    length = sum(len(stream.prompt.token_ids) for stream in streams)
    if length * (wanted + 1) > MAX_PROMPT_CANDIDATES:
        text = f"prompt_logprobs of {wanted} for {length} prompt tokens are {length * (wanted + 1)} candidates"
        raise ApiError(400, f"{text}; an answer has at most {MAX_PROMPT_CANDIDATES}", "prompt_logprobs")


def _budgeted(params: SamplingParams, body: FormFields) -> SamplingParams:
    """Give the params the budget of thinking that `body` has, if any. Raises ApiError."""
    budget = forms.thinking_budget(body)
    return params if budget is None else bodies.changed(params, thinking_token_budget=budget)


def _parsing(formats: Formats, body: ChatBody, tools: ToolsWanted | None) -> Parsing | None:
    """How the answers of a chat are taken apart; None if all of them is content."""
    parsing = Parsing(
        tools=() if tools is None else tuple(tools.given),
        is_forced=tools is not None and tools.is_forced,
        is_named=tools is not None and tools.mode == "named",
        parallel=tools is None or tools.parallel or tools.mode == "named",
        include_reasoning=body.include_reasoning is not False,
        num_calls_before=sum(len(message.tool_calls or ()) for message in body.messages),
    )
    return parsing if formats.finds(parsing.tools, is_forced=parsing.is_forced) else None


def _completion_changes(body: CompletionBody) -> dict[str, Any]:
    """Return the sampling params that a completion has under other names. Raises ApiError."""
    changes: dict[str, Any] = {"logprobs": body.logprobs}
    if body.only_scores:  # the engine always draws a token: the answer leaves it out
        changes |= {"max_tokens": 1, "min_tokens": 0}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise ApiError(400, "echo with logprobs is not supported in a stream", "echo")
        changes["prompt_logprobs"] = body.logprobs
    return changes


def _chat_changes(body: ChatBody) -> dict[str, Any]:
    """Return the sampling params that a chat has under other names. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.max_completion_tokens is not None:
        changes["max_tokens"] = body.max_completion_tokens
    return changes


# ---- the application


def build(
    api: ApiRoutes, live: LiveRequests, more: Sequence[Route], config: ServeConfig, keys: Keys, metrics: Metrics
) -> Starlette:
    """Make the ASGI application."""
    gets: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", api.health),
        ("/health/live", api.live),
        ("/health/ready", api.health),
        ("/ping", api.health),
        ("/version", api.version),
        (METRICS_PATH, metrics.get),
        ("/openapi.json", api.openapi),
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
    routes += [Route(path, live.reader.holding(method), methods=["POST"]) for path, method in posts]
    routes.append(Route("/ping", api.health, methods=["POST"]))
    routes += [*live.routes(), *pages.routes(), *more]
    metrics.know(routes)
    open_paths = OPEN_PATHS
    open_paths |= {METRICS_PATH} if config.public_metrics else frozenset()
    open_paths |= DOCS_PATHS if config.public_docs else frozenset()
    auth = Middleware(AuthMiddleware, keys=keys, is_local=config.is_local, open_paths=open_paths)
    short = frozenset(route.path.removeprefix(V1) for route in routes if route.path.startswith(f"{V1}/"))
    paths = Middleware(PathMiddleware, short=short - {route.path for route in routes})
    middleware = [paths, Middleware(metrics.counting), auth]
    if origins := config.origins(keys):
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
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
    return ApiError(error.status_code, text, headers=dict(error.headers or {})).response()


async def _on_fault(_: Request, error: Exception) -> Response:
    """Answer for a fault of ours. Its traceback goes to the log, not to the client."""
    del error
    return ApiError(500, "the server failed; its log says why").response()
