"""What every request passes before any route: it gets an id, and shows its key."""

import os
import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_lite.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""What needs no key. Compared with the path as the server routes it, so that no header moves it."""
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: Sequence[str] = (), open_paths: frozenset[str] = OPEN_PATHS) -> None:
        """Without `keys` everybody may call."""
        self._app = app
        self._open_paths = open_paths
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else os.urandom(12).hex().encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        if (
            self._digests
            and scope["path"] not in self._open_paths
            and not self._knows(headers.get(b"authorization", b""))
        ):
            message = "a valid API key is needed, as `Authorization: Bearer KEY`"
            error = ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _knows(self, authorization: bytes) -> bool:
        """In a time that does not tell how much of a key was right, nor which."""
        scheme, _, key = authorization.partition(b" ")
        digest = sha256(key.strip()).digest()
        known = False
        for other in self._digests:
            known |= compare_digest(digest, other)
        return known and scheme.lower() == b"bearer"
