"""The router's own routes: models and their states, health, metrics; every other route is forwarded to the model that
the request names.

/models and its two sub-routes are those of llama.cpp's server in router mode; /running and /unload are llama-swap's.
"""

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.errors import EngineError
from vllm_lite.server.http.application import gets, posts
from vllm_lite.server.http.auth import require_admin
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router.exposition import merged
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.forward import ForwardedAnswer, RoutedBody, read_routed
from vllm_lite.server.router.known import describe
from vllm_lite.server.router.member import FleetModel

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]
EVENT_S = 0.5
SCRAPE_S = 5.0
OF_ROUTER = frozenset({"/sleep", "/wake_up"})
"""Routes that clients must not call on a model: the router manages memory itself."""
OF_PREFIX = "/debug/prefix"
"""Route of a question about the prefix cache, for which no model is loaded."""


class RouterRoutes:
    """Answers all routes but Ollama's."""

    def __init__(self, fleet: Fleet, reader: BodyReader) -> None:
        self._fleet = fleet
        self._reader = reader
        self._created = int(time.time())
        self._adapters: dict[str, str] = {}

    def routes(self) -> list[Route]:
        about = {
            "/health": self.health,
            "/health/live": self.live,
            "/health/ready": self.health,
            "/version": self.version,
            "/load": self.load_of_all,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/running": self.running,
            "/unload": self.unload_all,
        }
        of_models = {
            "/models/load": self.load,
            "/models/unload": self.unload,
            "/unload": self.unload_named,
            "/api/models/unload": self.unload_all,
            "/api/models/unload/{model:path}": self.unload,
        }
        upstream = Route("/upstream/{rest:path}", self.upstream, methods=METHODS)
        return [*gets(about), *posts(of_models), upstream, Route("/ping", self.health, methods=["GET", "POST"])]

    def rest(self) -> Route:
        """The fallback route, which forwards."""
        return Route("/{path:path}", self.forward, methods=METHODS)

    # ---- models

    def card(self, member: FleetModel, name: str | None = None) -> dict[str, Any]:
        """An entry of /v1/models, with the model's state."""
        entry, status = member.entry, member.status
        config = entry.config
        length = None if config is None else config.max_model_len or describe(entry).facts.context_length
        state: dict[str, Any] = {"value": member.state}
        if member.state == "failed":
            state["failed"] = True
        return {
            "id": name or entry.name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm_lite",
            "root": None if config is None else config.model,
            "parent": None if name in (None, *entry.names) else entry.name,
            "max_model_len": length,
            "permission": [],
            "status": state,
            "vllm_lite": {
                "aliases": list(entry.aliases),
                "pinned": entry.pin,
                "pid": None if member.backend is None else member.backend.pid,
                "memory_bytes": status.held_bytes,
                "expected_bytes": status.expected_bytes,
                "active_requests": status.num_active,
                "waiting_requests": status.num_waiting,
                "load_s": round(member.load_s, 3),
                "error": member.trouble,
            },
        }

    async def models(self, _: Request) -> Response:
        members = self._fleet.members.values()
        names = [(member, name) for member in members for name in (*member.entry.names, *member.entry.adapters)]
        return as_json({"object": "list", "data": [self.card(*each) for each in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return as_json(self.card(self._fleet.find(name), name))

    async def running(self, _: Request) -> Response:
        words = {"loaded": "ready", "loading": "starting", "unloading": "stopping", "sleeping": "stopped"}
        members = [member for member in self._fleet.members.values() if member.backend is not None]
        return as_json(
            {"running": [{"model": each.entry.name, "state": words.get(each.state, each.state)} for each in members]}
        )

    async def load(self, request: Request) -> Response:
        """Start loading a model; with `stream`, send events about its state until it is loaded."""
        require_admin(request)
        member, routed = await self._named(request)
        self._fleet.keep(member, member.keep_alive_s)
        loading = self._fleet.wish(member)
        if not routed.field("stream", bool | None):
            return as_json({"success": True})
        return StreamingResponse(self._events(member, loading), media_type="text/event-stream")

    async def unload(self, request: Request) -> Response:
        """Unload a model once its requests have ended."""
        require_admin(request)
        member, _ = await self._named(request)
        self._fleet.let_go(member)
        return as_json({"success": True})

    async def unload_named(self, request: Request) -> Response:
        """Unload the model that the body names, or all if it names none."""
        require_admin(request)
        routed = await read_routed(request, self._reader)
        if (name := routed.field("model", str | None)) is None:
            return await self.unload_all(request)
        self._fleet.let_go(self._fleet.find(name))
        return as_json({"success": True})

    async def unload_all(self, request: Request) -> Response:
        require_admin(request)
        for member in self._fleet.members.values():
            self._fleet.let_go(member)
        return as_json({"msg": "ok"})

    async def _named(self, request: Request) -> tuple[FleetModel, RoutedBody]:
        if "model" in request.path_params:
            return self._fleet.find(request.path_params["model"]), RoutedBody(b"", {})
        routed = await read_routed(request, self._reader)
        return self._fleet.find(routed.field("model", str | None)), routed

    async def _events(self, member: FleetModel, loading: "asyncio.Task[None]") -> Any:
        """Yield events with the model's state until it is loaded or has failed."""
        began_s, error = time.monotonic(), None
        while not loading.done():
            yield self._event(member, began_s, None)
            await asyncio.wait((loading,), timeout=EVENT_S)
        if not loading.cancelled() and (failure := loading.exception()) is not None:
            error = failure.message if isinstance(failure, ApiError) else str(failure)
        yield self._event(member, began_s, error)

    def _event(self, member: FleetModel, began_s: float, error: str | None) -> bytes:
        elapsed_s = round(time.monotonic() - began_s, 1)
        event = {
            "model": member.entry.name,
            "status": member.state,
            "elapsed_s": elapsed_s,
            "usual_s": member.load_s or None,
        }
        return b"data: " + msgspec.json.encode(event if error is None else {**event, "error": error}) + b"\n\n"

    # ---- the router itself

    async def health(self, _: Request) -> Response:
        if self._fleet.is_draining:
            raise ApiError(503, "the server is shutting down")
        return Response()

    async def live(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return as_json({"version": __version__})

    async def load_of_all(self, _: Request) -> Response:
        statuses = [member.status for member in self._fleet.members.values()]
        return as_json({"server_load": sum(each.num_active + each.num_waiting for each in statuses)})

    async def metrics(self, _: Request) -> Response:
        members = [member for member in self._fleet.members.values() if member.status.state != "unloaded"]

        async def of(member: FleetModel) -> str:
            body: bytes = await member.backend.get("/metrics", SCRAPE_S)
            return body.decode(errors="replace")

        found = await asyncio.gather(*map(of, members), return_exceptions=True)
        texts = [text for text in found if isinstance(text, str)]
        return Response(merged(self._fleet, texts), media_type=MEDIA_TYPE)

    # ---- everything else

    async def upstream(self, request: Request) -> Response:
        """Forward /upstream/MODEL/PATH to the model as /PATH, as llama-swap does. Names may have slashes."""
        parts = request.path_params["rest"].split("/")
        for count in range(len(parts), 0, -1):
            if (entry := self._fleet.catalog.find("/".join(parts[:count]))) is not None:
                request.scope["path"] = "/" + "/".join(parts[count:])
                return self._sent_on(self._fleet.find(entry.name), request, await read_routed(request, self._reader))
        raise ApiError(404, f"{request.scope['path'][:200]!r} names no model; give /upstream/MODEL/PATH", "model")

    async def forward(self, request: Request) -> Response:
        routed = await read_routed(request, self._reader)
        name = routed.field("model", str | None) or request.query_params.get("model")
        if name is None and "lora_name" in routed.fields:
            name = self._adapters.get(routed.field("lora_name", str))
        if name is None and self._is_about_requests(request) and (request.method == "GET" or self._has_several()):
            return await self._ask_each(request, routed)
        return self._sent_on(self._fleet.find(name), request, routed)

    def _sent_on(self, member: FleetModel, request: Request, routed: RoutedBody) -> Response:
        """Make the answer that forwards a request to a model. Raises ApiError."""
        path = request.scope["path"]
        if path in OF_ROUTER:
            raise ApiError(400, f"{path} is the router's to call here; POST /models/unload gives a model's memory back")
        if path == OF_PREFIX and member.state != "loaded":
            name = member.entry.name
            raise ApiError(409, f"the model {name!r} is {member.state}, so nothing of its prompts is cached in memory")
        if "lora_name" in routed.fields:
            self._know_adapter(member, path, routed.field("lora_name", str))
        return ForwardedAnswer(self._fleet, member, request, routed, self._reader)

    def _know_adapter(self, member: FleetModel, path: str, adapter: str) -> None:
        entry, names = member.entry, member.entry.adapters
        if path.endswith("/unload_lora_adapter"):
            entry.adapters = tuple(each for each in names if each != adapter)
            self._adapters.pop(adapter, None)
        elif self._fleet.catalog.find(adapter) is None and len(names) < MAX_ADAPTERS:
            entry.adapters = (*names, adapter)
            self._adapters[adapter] = entry.name

    def _has_several(self) -> bool:
        return len(self._fleet.members) > 1

    def _is_about_requests(self, request: Request) -> bool:
        parts = request.scope["path"].strip("/").split("/")
        return len(parts) >= len(_ABOUT[0]) + 1 and tuple(parts[:2]) in _ABOUT

    async def _ask_each(self, request: Request, routed: RoutedBody) -> Response:
        """Forward a request about an id to the first model that knows it, as the id does not name the model. Models
        that are falling asleep or waking are asked too, as their processes run."""
        for member in self._fleet.members.values():
            is_up = member.status.state != "unloaded" and member.status.op != "stop"
            if member.backend is not None and is_up and await self._knows(member, request):
                return ForwardedAnswer(self._fleet, member, request, routed, self._reader, needs_loaded=False)
        raise ApiError(404, f"no loaded model knows {request.scope['path']}")

    async def _knows(self, member: FleetModel, request: Request) -> bool:
        from vllm_lite.server.router.forward import sent_on
        from vllm_lite.server.router.upstream import UpstreamLost

        what = "/".join(request.scope["path"].split("/")[:4])
        try:
            async with asyncio.timeout(SCRAPE_S):
                answer = await member.backend.open("GET", what.encode(), sent_on(request), b"")
        except (TimeoutError, UpstreamLost, EngineError):
            return False
        answer.close()
        return answer.status not in (401, 403, 404)  # a model with its own keys answers 401 for any id


MAX_ADAPTERS = 1000
_ABOUT = (("v1", "requests"), ("v1", "responses"))
