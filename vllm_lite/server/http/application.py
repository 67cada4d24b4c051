"""Routes as an ASGI application, with checks of callers, web pages and keys, and handlers of errors."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.auth import OPEN_PATHS, AuthMiddleware
from vllm_lite.server.http.callers import LOCAL_PAGES, Callers
from vllm_lite.server.http.dialects import Dialects
from vllm_lite.server.http.paths import PathMiddleware
from vllm_lite.server.openai.errors import ApiError, shown

Handlers = Mapping[str, Callable[[Request], Awaitable[Response]]]
"""Handlers by the paths of their routes."""


def gets(handlers: Handlers) -> list[Route]:
    return [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]


def posts(handlers: Handlers) -> list[Route]:
    return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]


class Guards(NamedTuple):
    """The checks before routes. `public` paths need no key; `short` ones are also accepted without /v1. The middleware
    `counts` sees every request, including those without a key."""

    config: ServeConfig
    keys: Keys
    dialects: Dialects
    public: Collection[str] = ()
    short: frozenset[str] = frozenset()
    counts: Sequence[Middleware] = ()


def guarded(routes: Sequence[Route], guards: Guards) -> Starlette:
    config, dialects = guards.config, guards.dialects
    callers = Callers.of(config, guards.keys)
    open_paths = OPEN_PATHS.union(guards.public)
    paths = Middleware(PathMiddleware, short=guards.short, root=config.root)
    auth = Middleware(AuthMiddleware, keys=guards.keys, callers=callers, open_paths=open_paths, dialects=dialects)
    middleware = [paths, *guards.counts, auth]
    if config.allowed_origins or callers.local_pages:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins or (),
            allow_origin_regex=LOCAL_PAGES if callers.local_pages else None,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            allow_private_network=True,  # a browser asks before a page of the internet calls this machine
        )
        middleware.insert(0, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=_handlers(dialects))
    app.router.redirect_slashes = False  # a redirect would go to the host that the Host header names
    return app


def _handlers(dialects: Dialects) -> dict[Any, Any]:
    """Handlers that answer each kind of error in the format of the route's API."""

    async def on_api_error(request: Request, error: ApiError) -> Response:
        return dialects.response(request.scope, error)

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {shown(request.scope['path'])}: {error.detail}"
        return dialects.response(request.scope, ApiError(error.status_code, text, headers=dict(error.headers or {})))

    async def on_fault(request: Request, error: Exception) -> Response:
        """Answer 500 for a bug. Its traceback goes to the log, not to the client."""
        del error
        return dialects.response(request.scope, ApiError(500, "the server failed; its log says why"))

    return {ApiError: on_api_error, HTTPException: on_http_error, Exception: on_fault}
