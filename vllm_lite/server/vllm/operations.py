"""Routes that pause the engine, put it to sleep, replace its weights and profile it: for admins."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.engines.operations import operation_of
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import RequestError
from vllm_lite.protocol.operations import Operation, Sleep
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.http.application import gets, posts
from vllm_lite.server.http.auth import require_admin
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.bodies import UpdateWeightsBody
from vllm_lite.server.openai.errors import ApiError

MAX_WAITING = 64
"""Maximum number of unfinished operations of one API server; the engine carries them out one by one."""


class OperationRoutes:
    """Answers the routes: one method each. The engine's state is visible to all API servers in front of it."""

    def __init__(self, calls: Calls, reader: BodyReader, config: ResolvedConfig) -> None:
        self._calls = calls
        self._reader = reader
        self._config = config
        self._num_waiting = 0

    def routes(self) -> list[Route]:
        states = {"/is_paused": self.is_paused, "/is_sleeping": self.is_sleeping, "/get_world_size": self.world_size}
        operations = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/start_profile": self.start_profile,
            "/stop_profile": self.stop_profile,
            "/update_weights": self.update_weights,
        }
        return gets(states) + posts(operations)

    async def pause(self, request: Request) -> Response:
        await self._operate(request, "pause", ("mode", "clear_cache"))
        return as_json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._operate(request, "resume")
        return as_json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        require_admin(request)
        return as_json({"is_paused": (await self._calls.stats()).rests})

    async def sleep(self, request: Request) -> Response:
        asked = await self._operate(request, "sleep", ("level", "mode"))
        return as_json({"status": "sleeping", "level": asked.level if isinstance(asked, Sleep) else None})

    async def wake_up(self, request: Request) -> Response:
        """Wake the engine. `tags` may be repeated; the engine sleeps until both kinds of memory have been named."""
        tags = request.query_params.getlist("tags")
        await self._operate(request, "wake_up", tags=tags)
        is_asleep = (await self._calls.stats()).sleep_level is not None
        return as_json({"status": "sleeping" if is_asleep else "awake", "tags": tags or None})

    async def is_sleeping(self, request: Request) -> Response:
        require_admin(request)
        return as_json({"is_sleeping": (await self._calls.stats()).sleep_level is not None})

    async def world_size(self, request: Request) -> Response:
        """Answer with the number of workers, of all engines unless `include_dp` is false."""
        require_admin(request)
        alone = request.query_params.get("include_dp", "true").lower() in ("false", "0")
        return as_json({"world_size": self._config.tensor_parallel_size if alone else self._config.ranks_on_machine})

    async def start_profile(self, request: Request) -> Response:
        await self._operate(request, "start_profile")
        return as_json({"status": "profiling"})

    async def stop_profile(self, request: Request) -> Response:
        await self._operate(request, "stop_profile")
        return as_json({"status": "written"})

    async def update_weights(self, request: Request) -> Response:
        require_admin(request)
        body, headers = await self._reader.read(request, UpdateWeightsBody)
        if body.update_info is not None or body.model is None:
            text = "weights come from a folder on the engine's machine: give model, not update_info of a transfer"
            raise ApiError(400, text, "model" if body.update_info is None else "update_info")
        await self._done(operation_of("update_weights", model=body.model, mode=body.mode or "wait"), "model")
        return as_json({"message": "Weights updated", "model": body.model}, headers)

    async def _operate(self, request: Request, name: str, fields: tuple[str, ...] = (), **more: Any) -> Operation:
        """Make an operation of the query parameters, and carry it out. Raises ApiError."""
        require_admin(request)
        query = request.query_params
        try:
            message = operation_of(name, **{field: query[field] for field in fields if field in query}, **more)
        except RequestError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0]) from error
        await self._done(message)
        return message

    async def _done(self, message: Operation, param: str | None = None) -> None:
        """Have the engine carry out an operation. Raises ApiError if it fails; `param` is the field that the error
        names."""
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(429, f"{self._num_waiting} such requests wait for each other already; try again later")
        self._num_waiting += 1
        try:
            done = await self._calls.operate(message)
        finally:
            self._num_waiting -= 1
        if done.error is not None:
            raise ApiError(400, done.error, param) if done.bad_input else ApiError(503, done.error)
