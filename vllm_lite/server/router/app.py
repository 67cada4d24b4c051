"""The router's ASGI application: its own routes, Ollama's that manage models, and everything else sent on."""

from starlette.applications import Starlette

from vllm_lite.server.app import DIALECTS, DOCS_PATHS
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.application import Guards, guarded
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.metrics import PATH as METRICS_PATH
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.ollama import OllamaManagement
from vllm_lite.server.router.routes import RouterRoutes


def build(fleet: Fleet, config: ServeConfig, keys: Keys) -> Starlette:
    """Make the application. `keys` are those that the router takes; models may ask for their own."""
    reader = BodyReader(config, takes_images=True)
    own = RouterRoutes(fleet, reader)
    public = {METRICS_PATH} if config.public_metrics else set()
    public |= DOCS_PATHS if config.public_docs else frozenset()
    routes = [*OllamaManagement(fleet, reader).routes(), *own.routes(), own.rest()]
    return guarded(routes, Guards(config, keys, DIALECTS, public))
