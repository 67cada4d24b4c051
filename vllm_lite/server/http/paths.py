"""Paths as clients write them: with a slash at the end, with two in a row, without /v1."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")


class PathMiddleware:
    """ASGI middleware, before all that looks at a path: brings it into the form of the routes.

    `short` are routes below /v1 that are taken without it as well, such as /chat/completions.
    """

    def __init__(self, app: ASGIApp, short: frozenset[str]) -> None:
        self._app = app
        self._short = short

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = plain(scope["path"])
            path = f"/v1{path}" if path in self._short else path
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def plain(path: str) -> str:
    """`path` with single slashes, and none at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"
