"""The router's ASGI application: its own routes, Ollama's that manage models, and everything else sent on."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from vllm_lite.server.app import DIALECTS, DOCS_PATHS
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.auth import OPEN_PATHS, AuthMiddleware
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.http.callers import LOCAL_PAGES, Callers
from vllm_lite.server.http.paths import PathMiddleware
from vllm_lite.server.openai.errors import ApiError, shown
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.ollama import OllamaManagement
from vllm_lite.server.router.routes import RouterRoutes


def build(fleet: Fleet, config: ServeConfig, keys: Keys) -> Starlette:
    """Make the application. `keys` are those that the router takes; models may ask for their own."""
    reader = BodyReader(config, takes_images=True)
    own = RouterRoutes(fleet, reader)
    callers = Callers.of(config, keys)
    open_paths = OPEN_PATHS | (frozenset({"/metrics"}) if config.public_metrics else frozenset())
    open_paths |= DOCS_PATHS if config.public_docs else frozenset()
    middleware = [
        Middleware(PathMiddleware, short=frozenset(), root=config.root),
        Middleware(AuthMiddleware, keys=keys, callers=callers, open_paths=open_paths, dialects=DIALECTS),
    ]
    if config.allowed_origins or callers.local_pages:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins or (),
            allow_origin_regex=LOCAL_PAGES if callers.local_pages else None,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_fault}
    routes = [*OllamaManagement(fleet, reader).routes(), *own.routes(), own.rest()]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return DIALECTS.response(request.scope, error)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {shown(request.scope['path'])}: {error.detail}"
    return DIALECTS.response(request.scope, ApiError(error.status_code, text, headers=dict(error.headers or {})))


async def _on_fault(request: Request, error: Exception) -> Response:
    """UpstreamAnswer for a fault of ours. Its traceback goes to the log, not to the client."""
    del error
    return DIALECTS.response(request.scope, ApiError(500, "the server failed; its log says why"))
