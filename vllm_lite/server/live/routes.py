"""GET /v1/live, and /v1/live/settings."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.http.auth import require_watcher
from vllm_lite.server.live.feed import Feed
from vllm_lite.server.live_requests import as_json

PATH = "/v1/live"


class LiveRoutes:
    """Answers with server-sent events, for whom everybody's requests may be shown to."""

    def __init__(self, calls: Calls, settings: Mapping[str, Any]) -> None:
        """`settings` as of settings_of()."""
        self._feed = Feed(calls)
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.live, methods=["GET"]),
            Route(f"{PATH}/settings", self.settings, methods=["GET"]),
        ]

    async def live(self, request: Request) -> Response:
        require_watcher(request)
        self._feed.check()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._feed.watch(), media_type="text/event-stream", headers=headers)

    async def settings(self, request: Request) -> Response:
        """Answer with how what is served is computed, and the command that started it."""
        require_watcher(request)
        return as_json(self._settings)
