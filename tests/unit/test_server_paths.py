"""Paths as clients write them come to the route that is meant, and no door opens by how one is written."""

from typing import Any

import pytest

from vllm_lite.errors import ConfigError
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.auth import AuthMiddleware
from vllm_lite.server.http.callers import Callers
from vllm_lite.server.http.paths import PathMiddleware, plain
from vllm_lite.server.openai import openapi

SHORT = frozenset({"/models", "/chat/completions"})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("/", "/"), ("", "/"), ("//", "/"), ("/a", "/a"), ("/a/", "/a"), ("//a///b//", "/a/b"), ("/a b/", "/a b")],
)
def test_slashes(written: str, meant: str) -> None:
    assert plain(written) == meant


async def seen(path: str, keys: Keys = Keys(), root: str = "") -> list[Any]:  # noqa: B008
    """The paths that come to the routes behind the keys; nothing if the door is closed."""
    paths: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        paths.append(scope["path"])

    async def send(_: Any) -> None:
        pass

    scope = {"type": "http", "path": path, "method": "GET", "headers": [], "http_version": "1.1"}
    auth = AuthMiddleware(app, keys, callers=Callers("127.0.0.1", is_local=True))
    await PathMiddleware(auth, SHORT, root)(scope, None, send)  # type: ignore[arg-type]
    assert scope["path"] == path, "another's scope was changed"
    return paths


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("//chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//models", "/v1/models"),
        ("/models", "/v1/models"),
        ("/metrics/", "/metrics"),
        ("/completions/x", "/completions/x"),
    ],
)
async def test_normalized_paths(written: str, meant: str) -> None:
    assert await seen(written) == [meant]


@pytest.mark.parametrize("path", ["/models", "//v1/models", "/v1/models/", "/health/../v1/models", "/health//x"])
async def test_no_path_bypasses_the_keys(path: str) -> None:
    assert await seen(path, Keys(("key",))) == []


async def test_open_paths_stay_open() -> None:
    assert await seen("//health/", Keys(("key",))) == ["/health"]


@pytest.mark.parametrize("start", ["", "/llm", "/llm/", "//llm//"])
@pytest.mark.parametrize("path", ["/v1/models", "/models", "/health"])
async def test_a_root_path_is_taken_and_left_out(start: str, path: str) -> None:
    meant = "/v1/models" if path == "/models" else path
    assert await seen(start + path, root="/llm") == [meant]


@pytest.mark.parametrize("path", ["/llmv1/models", "/LLM/v1/models", "/v1/llm/models", "/llm/llm/health"])
async def test_only_a_whole_root_path_is_taken(path: str) -> None:
    assert await seen(path, root="/llm") == [path.removeprefix("/llm") if path.startswith("/llm/") else path]


async def test_the_root_itself_gets_a_slash() -> None:
    assert await seen("/a/llm", root="/a/llm") == [], "links of the page would be those of /a"
    assert await seen("/a/llm/", root="/a/llm") == ["/"]


@pytest.mark.parametrize("path", ["/llm/v1/models", "/llm//models", "/llm/health/x"])
async def test_no_root_path_bypasses_the_keys(path: str) -> None:
    assert await seen(path, Keys(("key",)), root="/llm") == []


@pytest.mark.parametrize("path", ["llm", "/llm?x", "//llm", "/a b", "http://host/llm"])
def test_invalid_root_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path must be like /llm"):
        ServeConfig.load({"root_path": path})


def test_documents_name_the_root_path() -> None:
    assert openapi.document("/llm")["servers"] == [{"url": "/llm"}]
    assert "servers" not in openapi.document()
