"""GET /, /docs and /redoc: files without external resources, so that they work offline and leak nothing.

The page at / has its style and script in files beside it, the other page has them inline.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGES = {"/": "page.html", "/docs": "docs.html", "/redoc": "docs.html"}
PARTS = {"/page.css": "text/css", "/page.js": "text/javascript"}


LIVE, TRACE = b'data-mode="live"', b'data-mode="trace"'


def routes() -> list[Route]:
    """Routes of the pages. Raises OSError if a file is missing."""
    return [_route(path, _read(name), "text/html") for path, name in PAGES.items()] + _parts()


def trace_routes() -> list[Route]:
    """Routes of the page at / in its trace mode. Raises OSError if a file is missing."""
    return [_route("/", _read(PAGES["/"]).replace(LIVE, TRACE), "text/html"), *_parts()]


def _parts() -> list[Route]:
    return [_route(path, _read(path.removeprefix("/")), kind) for path, kind in PARTS.items()]


def _read(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


def _route(path: str, content: bytes, kind: str) -> Route:
    headers = {
        "Content-Security-Policy": policy(content),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def show(_: Request) -> Response:
        return Response(content, media_type=kind, headers=headers)

    return Route(path, show)


def policy(page: bytes) -> str:
    """Content security policy of a page: only its inline scripts and styles, or this server's files if it has none, and
    connections to this server only."""
    scripts, styles = (
        " ".join(map(_digest, re.findall(tag, page, re.DOTALL))) or "'self'" for tag in (_SCRIPT, _STYLE)
    )
    return (
        f"default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_SCRIPT, _STYLE = rb"<script>(.*?)</script>", rb"<style>(.*?)</style>"


def _digest(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
