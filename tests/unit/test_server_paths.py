"""Paths as clients write them come to the route that is meant, and no door opens by how one is written."""

import asyncio
from typing import Any

import pytest

from vllm_lite.server.config import Keys
from vllm_lite.server.http.auth import AuthMiddleware
from vllm_lite.server.http.paths import PathMiddleware, plain

SHORT = frozenset({"/models", "/chat/completions"})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("/", "/"), ("", "/"), ("//", "/"), ("/a", "/a"), ("/a/", "/a"), ("//a///b//", "/a/b"), ("/a b/", "/a b")],
)
def test_slashes(written: str, meant: str) -> None:
    assert plain(written) == meant


def seen(path: str, keys: Keys = Keys()) -> list[Any]:  # noqa: B008
    """The paths that come to the routes behind the keys; nothing if the door is closed."""
    paths: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        paths.append(scope["path"])

    async def send(_: Any) -> None:
        pass

    scope = {"type": "http", "path": path, "method": "GET", "headers": []}
    auth = AuthMiddleware(app, keys, is_local=True)
    asyncio.run(PathMiddleware(auth, SHORT)(scope, None, send))  # type: ignore[arg-type]
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
def test_what_is_meant(written: str, meant: str) -> None:
    assert seen(written) == [meant]


@pytest.mark.parametrize("path", ["/models", "//v1/models", "/v1/models/", "/health/../v1/models", "/health//x"])
def test_no_path_goes_round_the_keys(path: str) -> None:
    assert seen(path, Keys(("key",))) == []


def test_open_paths_stay_open() -> None:
    assert seen("//health/", Keys(("key",))) == ["/health"]
