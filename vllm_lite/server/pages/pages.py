"""GET /, /docs and /redoc: files with nothing from elsewhere, so that they work without a network and tell nobody."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGES = {"/": "welcome.html", "/docs": "docs.html", "/redoc": "docs.html"}


def routes() -> list[Route]:
    return [_route(path, Path(__file__).with_name(name).read_bytes()) for path, name in PAGES.items()]


def _route(path: str, page: bytes) -> Route:
    headers = {
        "Content-Security-Policy": policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def show(_: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return Route(path, show, methods=["GET"])


def policy(page: bytes) -> str:
    """A browser runs the script of the page and no other, and lets it speak to this server only."""
    scripts, styles = (" ".join(map(_digest, re.findall(tag, page, re.DOTALL))) for tag in _INLINE)
    return (
        f"default-src 'none'; connect-src 'self'; script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_INLINE = (rb"<script>(.*?)</script>", rb"<style>(.*?)</style>")


def _digest(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
