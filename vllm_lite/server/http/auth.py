"""AuthMiddleware: gives every request an id and checks its API key, before any route.

A user key allows the routes that generate. Routes that change the server call require_admin(): they need an admin key,
which allows all other routes as well. With API keys but no admin key, nobody can change the server. Without any keys,
programs on this machine can, but no web page, and nobody behind a proxy (callers.py).
"""

import os
import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_lite.server.config import Keys
from vllm_lite.server.http.callers import Callers
from vllm_lite.server.http.dialects import OPENAI, REQUEST_ID, Dialects
from vllm_lite.server.openai.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths that need no key. They are compared with the path as the server routes it, so that no header can change it."""
_NO_ADMIN = "vllm_lite.no_admin"
"""Scope key: the error for a sender that is not an admin, None for an admin."""
_TRUSTING = "vllm_lite.trusting"
"""Scope key: the Callers of a server without keys, None if there are keys."""
_KEY = "vllm_lite.key"
"""Scope key: the digest of the request's key, b"" if it is not one of the server's."""
_REACH = "vllm_lite.reach"
"""Scope key: digests of the keys whose calls the sender may read, fork and end; its own is first."""
KEY_HEADERS = {b"authorization": b"", b"x-api-key": b"Bearer ", b"api-key": b"Bearer "}
"""Headers that may have a key, and the prefix to add if clients of that API send the bare key."""
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
MAX_NAMED_CHARS = 200
"""Maximum number of characters of an id in a call's name; the owner after it is a digest over the whole id."""
_FLAGS = "--admin-api-key or --admin-api-key-file"


class AuthMiddleware:
    """ASGI middleware: lets requests with a valid key pass."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        *,
        callers: Callers,
        open_paths: frozenset[str] = OPEN_PATHS,
        dialects: Dialects = OPENAI,
    ) -> None:
        """Without user keys, all senders that `callers` does not refuse are allowed."""
        self._app = app
        self._open_paths = open_paths
        self._users, self._admins = _digests(keys.user), _digests(keys.admin)
        self._callers = callers
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else os.urandom(12).hex().encode()
        scope[REQUEST_ID] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        if refusal := self._callers.refusal(Headers(scope=scope)):
            await self._dialects.response(scope, refusal)(scope, receive, send_with_id)
            return
        authorization = _authorization(scope["headers"])
        is_user, is_admin = _is_among(self._users, authorization), _is_among(self._admins, authorization)
        if self._users and scope["path"] not in self._open_paths and not (is_user or is_admin):
            error = _unknown("a valid API key is needed")
            await self._dialects.response(scope, error)(scope, receive, send_with_id)
            return
        scope[_KEY] = _digest_in(authorization) if is_user or is_admin else b""
        scope[_REACH] = [scope[_KEY], *([b"", *self._users, *self._admins] if is_admin else [])]
        scope[_NO_ADMIN] = None if is_admin else self._why_no_admin(authorization, scope)
        scope[_TRUSTING] = None if self._users or self._admins else self._callers
        await self._app(scope, receive, send_with_id)

    def _why_no_admin(self, authorization: bytes, scope: Scope) -> ApiError | None:
        if self._admins:
            return ApiError(403, "this needs an admin key") if authorization else _unknown("this needs an admin key")
        if self._users:
            return ApiError(403, f"this needs an admin key, and the server has none; start it with {_FLAGS}")
        strangers = self._callers.strangers(scope)
        if strangers is None:
            return None
        return ApiError(403, f"this is closed to {strangers} without keys; start the server with {_FLAGS}")


def _authorization(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the Authorization header, or another key header in its format; b"" if there is no key, or if one header
    has two different values: a proxy in front of the server may have checked the other."""
    for wanted, scheme in KEY_HEADERS.items():
        given = {value for name, value in headers if name == wanted and value}
        if given:
            return scheme + given.pop() if len(given) == 1 else b""
    return b""


def require_admin(request: Request) -> None:
    """Raise ApiError unless the sender may change the server."""
    reason: ApiError | None = request.scope[_NO_ADMIN]
    if reason is not None:
        raise reason


def require_watcher(request: Request) -> None:
    """Raise ApiError unless the sender may see everybody's requests: an admin or, without keys, a page of this server.
    Other pages cannot pass as one: browsers mark the origin of requests, and the host name has been checked."""
    callers: Callers | None = request.scope[_TRUSTING]
    if callers is None or callers.strangers(request.scope, but_own_pages=True) is not None:
        require_admin(request)


def owner_of(request: Request, call_id: str) -> str:
    """An opaque digest of the sender's key, different for each call; "" without keys. It reveals neither the key nor
    which calls have the same one."""
    return _owner(request.scope[_KEY], call_id)


def names_of(request: Request, call_id: str) -> list[str]:
    """Names (as of name_of()) of the calls with this id that the sender may read, fork and end: with its own key, which
    is first, and for an admin with every key."""
    return list(dict.fromkeys(name_of(call_id, _owner(digest, call_id)) for digest in request.scope[_REACH]))


def name_of(call_id: str, owner: str) -> str:
    """Name of a call in the servers and the engine. Clients choose ids, so each key has separate ids: the same id of
    two keys gives two names, and no client learns which ids others use."""
    return f"{call_id[:MAX_NAMED_CHARS]}~{owner}" if owner else call_id


def _owner(digest: bytes, call_id: str) -> str:
    return sha256(digest + call_id.encode()).hexdigest()[:32] if digest else ""


def holder_of(request: Request) -> str:
    """Digest of the sender's key for stored answers, "" without keys: senders with one key share them."""
    digest: bytes = request.scope[_KEY]
    return sha256(digest + b"holder").hexdigest()[:32] if digest else ""


def _unknown(message: str) -> ApiError:
    return ApiError(
        401, f"{message}, as `Authorization: Bearer KEY` or `x-api-key: KEY`", headers={"WWW-Authenticate": "Bearer"}
    )


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [sha256(key.encode()).digest() for key in keys]


def _is_among(digests: Sequence[bytes], authorization: bytes) -> bool:
    """Whether the header has one of the keys, in constant time: neither the matching key nor a matching prefix shows in
    it."""
    digest = _digest_in(authorization)
    num_equal = sum(compare_digest(digest, other) for other in digests)
    return num_equal > 0 and authorization.partition(b" ")[0].lower() == b"bearer"


def _digest_in(authorization: bytes) -> bytes:
    return sha256(authorization.partition(b" ")[2].strip()).digest()
