"""The table of routes names every route of an API server, and no other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from tests.fakes import welcome
from vllm_lite.client.generation_config import NONE, generation_defaults
from vllm_lite.config import EngineConfig
from vllm_lite.server.app import DOCS_PATHS
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.live.routes import OF_BLOCK, OF_SETTINGS
from vllm_lite.server.live.routes import PATH as LIVE
from vllm_lite.server.processes.scoreboard import Scoreboard
from vllm_lite.server.route_table import ROUTES, TableRoute
from vllm_lite.server.wiring import Application, EngineLink, ModelFiles

UNLISTED = {("get", path) for path in DOCS_PATHS - {"/version"}}
"""Pages for people, and /openapi.json itself."""
UNLISTED |= {("get", path) for path in (LIVE, OF_BLOCK, OF_SETTINGS)}
"""An endless stream and its details, for the page and `vllm-lite top`."""
UNLISTED |= {("post", "/ping")}
"""The same as GET; a client that sends POST needs no document."""

Routes = set[tuple[str, str]]


def served(app: Starlette) -> Routes:
    """Methods and paths of the application, as the table writes them."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes)
    pairs = {(method.lower(), route.path) for route in routes for method in route.methods or ()}
    return {(method, path.replace(":path}", "}")) for method, path in pairs if method != "head"}


def difference(app: Starlette, table: tuple[TableRoute, ...]) -> tuple[Routes, Routes]:
    """Routes that are served and not in the table, and routes of the table that are not served."""
    listed, found = {(route.method, route.path) for route in table}, served(app)
    return found - listed - UNLISTED, listed - found


@pytest.fixture
async def app(tmp_path: Path) -> Starlette:
    """The application of a server without an engine."""
    config = ServeConfig.check({"model": str(tmp_path)})
    resolved = EngineConfig.check({}).resolve(max_position_embeddings=100, dtype="float32", model_path=str(tmp_path))
    none = dict.fromkeys(("tokenizer", "template_text", "template", "renderer", "images", "formats"))
    defaults = generation_defaults(tmp_path, NONE)
    files = SimpleNamespace(**none, task_prompts={}, defaults=defaults, card=dict[str, str])
    link = EngineLink(cast(Any, SimpleNamespace(welcome=welcome(), adapters={})), resolved, str)
    return cast(Starlette, Application(config, Keys(), link, cast(ModelFiles, files), Scoreboard()).app)


async def test_every_route_is_in_the_table(app: Starlette) -> None:
    assert difference(app, ROUTES) == (set(), set())
    assert served(app) >= UNLISTED


async def test_a_missing_route_is_seen(app: Starlette) -> None:
    assert difference(app, ROUTES[1:]) == ({("post", "/v1/chat/completions")}, set())
    assert difference(app, (*ROUTES, TableRoute("get", "/nothing", "none"))) == (set(), {("get", "/nothing")})


def test_no_route_is_twice_in_the_table() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
