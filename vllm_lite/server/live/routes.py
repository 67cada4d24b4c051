"""GET /v1/live, /v1/live/blocks/NUMBER and /v1/live/settings."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_lite.errors import EngineError
from vllm_lite.protocol.view import BlockContent, GetBlock
from vllm_lite.server.calls.registry import PROBE_TIMEOUT_S, Calls
from vllm_lite.server.http.application import gets
from vllm_lite.server.http.auth import require_watcher
from vllm_lite.server.live.feed import Feed
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.errors import ApiError

PATH = "/v1/live"
OF_BLOCK, OF_SETTINGS = f"{PATH}/blocks/{{block}}", f"{PATH}/settings"
MAX_NUMBER, MAX_DIGITS = 2**31 - 1, 10


def _number(text: str, name: str) -> int:
    """Parse a number. Raises ApiError (400)."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) <= MAX_NUMBER):
        raise ApiError(400, f"{name} must be a number of at most {MAX_NUMBER}, got {text[:20]!r}", name)
    return int(text)


class LiveRoutes:
    """Answers for senders that may see everybody's requests; /v1/live with server-sent events."""

    def __init__(self, calls: Calls, settings: Mapping[str, Any]) -> None:
        self._calls = calls
        self._feed = Feed(calls)
        self._settings = settings

    def routes(self) -> list[Route]:
        return gets({PATH: self.live, OF_BLOCK: self.block, OF_SETTINGS: self.settings})

    async def live(self, request: Request) -> Response:
        require_watcher(request)
        self._feed.check()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._feed.watch(), media_type="text/event-stream", headers=headers)

    async def block(self, request: Request) -> Response:
        """Answer with the content of a KV block of one engine, by its hash, and the tiers that have it."""
        require_watcher(request)
        block = _number(request.path_params["block"], "block")
        engine = _number(request.query_params.get("engine", "0"), "engine")
        try:
            asked = self._calls.dispatcher.session.ask_one(engine, GetBlock(block), BlockContent)
            found = await asyncio.wait_for(asyncio.wrap_future(asked), PROBE_TIMEOUT_S)
        except LookupError:
            raise ApiError(404, f"there is no engine {engine}", "engine") from None
        except (TimeoutError, EngineError) as error:
            why = error if isinstance(error, EngineError) else f"not within {PROBE_TIMEOUT_S:g} s"
            raise ApiError(503, f"engine {engine} does not answer: {why}") from error
        if found.references is None:
            raise ApiError(404, f"engine {engine} has no block {block}")
        return as_json(
            {
                "block": found.block,
                "references": found.references,
                "hash": found.hash.hex() or None,
                "group": found.group,
                "tiers": found.tiers,
            }
        )

    async def settings(self, request: Request) -> Response:
        """Answer with the settings of the computation, and the command that started the server."""
        require_watcher(request)
        return as_json(self._settings)
