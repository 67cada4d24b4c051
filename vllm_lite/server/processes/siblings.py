"""The other API servers of a family: who asks one of them for a request gets what the one that has it answers.

Each listens on a Unix socket in the family's private folder too, where no key is asked for: whoever can open it is this
user, and what is passed on has been let in already.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_lite.server.calls.threads import until_gone
from vllm_lite.server.openai.errors import ApiError

ASK_S = 2.0
"""How long one may take to say what it knows; what it generates may take longer."""
_PASSED = frozenset({b"content-type", b"retry-after", b"cache-control", b"x-accel-buffering", b"warning"})


def socket_path(run_dir: str, number: int) -> str:
    """Where server `number` listens for the others."""
    return f"{run_dir}/api{number}"


class Siblings:
    """Seen from server `number`; false if there are none."""

    def __init__(self, run_dir: str = "", number: int = 0, count: int = 1) -> None:
        self.number = number
        self._others = {other: _client(socket_path(run_dir, other)) for other in range(count) if other != number}

    def __len__(self) -> int:
        return len(self._others)

    async def close(self) -> None:
        for client in self._others.values():
            await client.aclose()

    async def know(self, path: str) -> bool:
        """Whether one of them has what is at `path`."""
        answers = await asyncio.gather(*(_get(client, path) for client in self._others.values()))
        return any(answer is not None and answer.is_success for answer in answers)

    async def is_up(self, number: int, timeout_s: float) -> bool:
        """Whether it answers in that time."""
        return await _get(self._others[number], "/load", timeout_s) is not None

    async def loads(self, own: int) -> list[int]:
        """Of each server, in order; 0 for one that does not answer."""
        answers = await asyncio.gather(*(_get(client, "/load") for client in self._others.values()))
        loads = [0 if answer is None else int(answer.json()["server_load"]) for answer in answers]
        loads.insert(self.number, own)
        return loads

    def passed_on(self, request: Request, body: bytes = b"") -> Response:
        """What the one answers that has the request."""
        return _PassedOn(list(self._others.values()), request, body)


class _PassedOn(Response):
    """Ends at the other server, too, when the client goes."""

    def __init__(self, servers: list[httpx.AsyncClient], request: Request, body: bytes) -> None:
        super().__init__()
        self._servers = servers
        self._method, self._path = request.method, request.scope["raw_path"].decode("ascii")
        self._name = request.path_params["request_id"]
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        passing = asyncio.ensure_future(self._pass(send))
        watch = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait((passing, watch), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            passing.cancel()
            watch.cancel()

    async def _pass(self, send: Send) -> None:
        for server in self._servers:
            async with _answer(server, self._method, self._path, self._body) as answer:
                if answer is None or answer.status_code == 404:
                    continue
                headers = [(name, value) for name, value in answer.headers.raw if name.lower() in _PASSED]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
        raise ApiError(404, f"no request {self._name!r} is running")


@asynccontextmanager
async def _answer(
    server: httpx.AsyncClient, method: str, path: str, body: bytes
) -> AsyncIterator[httpx.Response | None]:
    """As it comes. None if the server does not answer: it is being started again, and has no requests."""
    asked = server.build_request(method, path, content=body, headers={"content-type": "application/json"})
    try:
        answer = await server.send(asked, stream=True)
    except httpx.TransportError:
        yield None
        return
    try:
        yield answer
    finally:
        await answer.aclose()


def _client(path: str) -> httpx.AsyncClient:
    # A connection for each question: one that is kept could be to a server that has died since.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(uds=path, limits=limits)
    patience = httpx.Timeout(None, connect=ASK_S)
    return httpx.AsyncClient(transport=transport, base_url="http://sibling", timeout=patience, trust_env=False)


async def _get(client: httpx.AsyncClient, path: str, timeout_s: float = ASK_S) -> httpx.Response | None:
    try:
        return await client.get(path, timeout=timeout_s)
    except httpx.TransportError:
        return None
