"""GET /v1/live."""

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.http.auth import require_watcher
from vllm_lite.server.live.feed import Feed

PATH = "/v1/live"


class LiveRoutes:
    """Answers with server-sent events, for whom everybody's requests may be shown to."""

    def __init__(self, calls: Calls) -> None:
        self._feed = Feed(calls)

    def routes(self) -> list[Route]:
        return [Route(PATH, self.live, methods=["GET"])]

    async def live(self, request: Request) -> Response:
        require_watcher(request)
        self._feed.check()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._feed.watch(), media_type="text/event-stream", headers=headers)
