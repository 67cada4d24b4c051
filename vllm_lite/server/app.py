"""The handlers of OpenAI's routes, and the ASGI application that has all routes."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.generation import Asked, Generation, Made
from vllm_lite.server.http.application import Guards, Handlers, gets, guarded, posts
from vllm_lite.server.http.dialects import Dialects
from vllm_lite.server.live_requests import LiveRequests, as_json
from vllm_lite.server.llama_server import errors as llama_cpp_errors
from vllm_lite.server.load_report import load_report
from vllm_lite.server.messages import errors as messages_errors
from vllm_lite.server.metrics import PATH as METRICS_PATH
from vllm_lite.server.metrics import Metrics
from vllm_lite.server.ollama import errors as ollama_errors
from vllm_lite.server.openai import openapi
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.prompts import SLICE_TOKENS
from vllm_lite.server.pages import pages

V1 = "/v1"
DIALECTS = Dialects(
    {
        **dict.fromkeys(messages_errors.PATHS, messages_errors.response),
        **dict.fromkeys(ollama_errors.PATHS, ollama_errors.response),
        **dict.fromkeys(llama_cpp_errors.PATHS, llama_cpp_errors.response),
    }
)
API_DOCS_PATHS = frozenset({"/docs", "/redoc", "/openapi.json"})
DOCS_PATHS = frozenset({*pages.PAGES, *pages.PARTS}) | {"/openapi.json", "/version"}


class ApiRoutes:
    """Handlers of OpenAI's routes and of /health, /ping, /version, /openapi.json: one method each."""

    def __init__(self, generation: Generation, root: str = "") -> None:
        """`root`: the path under which a proxy exposes the server."""
        self._generation = generation
        self._root = root
        self._model = generation.model
        self._prompts = generation.prompts
        self._calls = generation.live.calls
        self._reader = generation.live.reader

    # ---- generation

    async def completions(self, request: Request) -> Response:
        asked = await self._generation.read(request, CompletionBody)
        return await self._reporting(await self._generation.completion(asked), asked)

    async def chat(self, request: Request) -> Response:
        asked = await self._generation.read(request, ChatBody)
        return await self._reporting(await self._generation.chat(asked), asked)

    async def generate(self, request: Request) -> Response:
        asked = await self._generation.read(request, GenerateBody)
        return self._generation.respond(await self._generation.tokens(asked), asked)

    async def _reporting(self, made: Made, asked: Asked[Any]) -> Response:
        """The response, with a load report if one is asked for."""
        report = await load_report(asked.request, self._calls)
        return self._generation.respond(made._replace(headers={**made.headers, **report}), asked)

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._reader.read(request, TokenizeBody)
        self._model.name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either a prompt or messages", "prompt")
        if body.prompt is None:
            found = await self._prompts.of_chat(body, None, request, sees=True)
            ids, headers = found.token_ids, found.warned(headers)
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
        ids = self._generation.checked_ids(body.tokens, "tokens")
        text = await self._prompts.decode(ids, skip_special_tokens=False)
        return as_json({"prompt": text}, headers)

    # ---- models and health

    async def models(self, _: Request) -> Response:
        return as_json({"object": "list", "data": [self._model.card(name) for name in self._model.all_names]})

    async def model(self, request: Request) -> Response:
        return as_json(self._model.card(self._model.name(request.path_params["model"])))

    async def health(self, _: Request) -> Response:
        """200 only if the engine's loop answers, so that a request would be served."""
        await self._calls.probe()
        return Response()

    async def live(self, _: Request) -> Response:
        """200 as long as the engine is alive, even if it does not answer now."""
        if self._calls.death is not None:
            raise ApiError(503, self._calls.death)
        return Response()

    async def version(self, _: Request) -> Response:
        return as_json({"version": __version__})

    async def openapi(self, _: Request) -> Response:
        return as_json(openapi.document(self._root))


# ---- the application


def build(
    api: ApiRoutes, live: LiveRequests, more: Sequence[Route], config: ServeConfig, keys: Keys, metrics: Metrics
) -> Starlette:
    """Make the ASGI application."""
    about: Handlers = {
        "/health": api.health,
        "/health/live": api.live,
        "/health/ready": api.health,
        "/ping": api.health,
        "/version": api.version,
        METRICS_PATH: metrics.get,
        "/openapi.json": api.openapi,
        "/v1/models": api.models,
        "/v1/models/{model:path}": api.model,
    }
    of_texts = {
        "/v1/completions": api.completions,
        "/v1/chat/completions": api.chat,
        "/inference/v1/generate": api.generate,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
    }
    routes = [*gets(about), *posts(of_texts), *posts({"/ping": api.health})]
    routes += [*live.routes(), *pages.routes(), *more]
    if config.disable_fastapi_docs:
        routes = [route for route in routes if route.path not in API_DOCS_PATHS]
    routes = live.reader.holding_all(routes)
    metrics.know(routes)
    public = {METRICS_PATH} if config.public_metrics else set()
    public |= DOCS_PATHS if config.public_docs else frozenset()
    short = frozenset(route.path.removeprefix(V1) for route in routes if route.path.startswith(f"{V1}/"))
    short -= {route.path for route in routes}
    return guarded(routes, Guards(config, keys, DIALECTS, public, short, (Middleware(metrics.counting),)))
