"""PathMiddleware: normalizes paths with trailing or double slashes, without /v1, or below a proxy's root path."""

import re

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")


class PathMiddleware:
    """ASGI middleware, before everything that reads a path: normalizes it.

    `short` are routes below /v1 that are accepted without it as well, such as /chat/completions. `root` is the path
    under which a proxy exposes the server: routes are found below it, for proxies that keep it, and without it. The
    root itself is redirected to end with a slash, as the links of pages are relative.
    """

    def __init__(self, app: ASGIApp, short: frozenset[str], root: str = "") -> None:
        self._app = app
        self._short = short
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = plain(scope["path"])
            if self._root and f"{path}/".startswith(f"{self._root}/"):
                if scope["path"] == self._root and scope["method"] == "GET":
                    await RedirectResponse(f"{self._root.rpartition('/')[2]}/")(scope, receive, send)
                    return
                path = path[len(self._root) :] or "/"
            path = f"/v1{path}" if path in self._short else path
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def plain(path: str) -> str:
    """`path` with single slashes, and none at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"
