"""The server of `replay --page`: the page at / on a trace, for this machine only, until SIGTERM or Ctrl-C."""

import asyncio
import signal
import socket
from contextlib import suppress

import uvloop
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.errors import VllmLiteError
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.application import Guards, gets, guarded
from vllm_lite.server.http.auth import require_watcher
from vllm_lite.server.http.dialects import OPENAI
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.pages import pages
from vllm_lite.server.processes.http_server import started, uvicorn_of, where
from vllm_lite.server.processes.serve import bind
from vllm_lite.tools.replay.shown_trace import ShownTrace

MAX_ID_CHARS = 1024
NOT_KEPT = {"cache-control": "no-store"}


class TraceRoutes:
    """Routes with the data of a trace, for programs on this machine and the page itself."""

    def __init__(self, recording: ShownTrace) -> None:
        self._recording = recording
        self._telling = asyncio.Lock()
        """One story at a time, as each reads the whole trace."""

    def routes(self) -> list[Route]:
        path = "/v1/replay"
        answers = {path: self.trace, f"{path}/moments/{{number:int}}": self.moment, f"{path}/story": self.story}
        return pages.trace_routes() + gets(answers)

    async def trace(self, request: Request) -> Response:
        require_watcher(request)
        return as_json(self._recording.told(), NOT_KEPT)

    async def moment(self, request: Request) -> Response:
        require_watcher(request)
        number = request.path_params["number"]
        try:
            return as_json(self._recording.moment(number), NOT_KEPT)
        except IndexError:
            count = len(self._recording)
            raise ApiError(404, f"there is no moment {str(number)[:20]}; {count} have been read so far") from None

    async def story(self, request: Request) -> Response:
        """A request's story. The id is a query parameter, as it may contain characters that a path cannot."""
        require_watcher(request)
        name = request.query_params.get("request", "")
        if not name or len(name) > MAX_ID_CHARS:
            raise ApiError(400, f"request must have 1 to {MAX_ID_CHARS} characters", "request")
        async with self._telling:
            try:
                return as_json({"story": await run_in_threadpool(self._recording.story, name)}, NOT_KEPT)
            except VllmLiteError as error:
                raise ApiError(404, str(error)) from error


def app_of(recording: ShownTrace, config: ServeConfig) -> Starlette:
    return guarded(TraceRoutes(recording).routes(), Guards(config, Keys(), OPENAI))


def serve(path: str, port: int) -> int:
    """Serve the page of the trace at `path`. Returns the exit status. Raises VllmLiteError if it cannot start."""
    config = ServeConfig.load({"port": port})
    recording = ShownTrace(path)
    listener = bind(config)[0]
    try:
        recording.start()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(recording, config, listener))
    finally:
        listener.close()
        recording.close()


async def _serve(recording: ShownTrace, config: ServeConfig, listener: socket.socket) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = uvicorn_of(app_of(recording, config), config)
    serving = await started(server, listener)
    try:
        with suppress(OSError):  # the reader is gone; the server continues
            print(f"vllm-lite: {recording.path} is shown at {where(config, listener)[0]}/ until Ctrl-C", flush=True)
        await ended.wait()
        return 0
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
