"""The router's ASGI application: its own routes, Ollama's routes that manage models, and a fallback that forwards."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from vllm_lite.server.app import API_DOCS_PATHS, DIALECTS, DOCS_PATHS
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.application import Guards, gets, guarded
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.metrics import PATH as METRICS_PATH
from vllm_lite.server.openai import openapi
from vllm_lite.server.pages import pages
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.ollama import OllamaManagement
from vllm_lite.server.router.routes import RouterRoutes
from vllm_lite.server.router.watch import RouterLive


def build(fleet: Fleet, config: ServeConfig, keys: Keys) -> Starlette:
    """Make the application. `keys` are the router's; models may require their own."""
    reader = BodyReader(config, takes_images=True)
    own = RouterRoutes(fleet, reader)
    public = {METRICS_PATH} if config.public_metrics else set()
    public |= DOCS_PATHS if config.public_docs else frozenset()

    async def document(_: Request) -> Response:
        return as_json(openapi.document(config.root))

    documents = [*pages.routes(), *gets({"/openapi.json": document})]
    if config.disable_fastapi_docs:
        documents = [route for route in documents if route.path not in API_DOCS_PATHS]
    routes = [*OllamaManagement(fleet, reader).routes(), *own.routes(), *RouterLive(fleet).routes(), *documents]
    return guarded(reader.holding_all([*routes, own.rest()]), Guards(config, keys, DIALECTS, public))
