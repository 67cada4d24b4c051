"""HttpReplica: the HTTP application of `serve`, as a replica of Ray Serve in front of the engine's replicas.

It holds the streams, which therefore survive an engine's replica. It needs no GPU, and one handles thousands of
streams.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_lite.checkpoint import hub
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import EngineDeadError
from vllm_lite.ray.broadcast import broadcast, first_line
from vllm_lite.ray.catch_up import ReplicaState, states
from vllm_lite.ray.messages import UNKNOWN, Answer, Introduction, Route, Routed, answers, encode, introductions
from vllm_lite.ray.orphan import end_without_raylet
from vllm_lite.ray.session import ReplicaLostError, ServeSession
from vllm_lite.runtime import log
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes.scoreboard import Scoreboard
from vllm_lite.server.wiring import Application, EngineLink, ModelFiles

LOOK_S = 5.0
"""Timeout for replicas to introduce themselves."""


class ServeReplicas:
    """Replicas, reached through Ray Serve. Streams go over gRPC, which costs a third as much as Ray's objects for small
    messages."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._streams = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._handle = handle
        self.num_silent = 0

    async def generate(self, payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
        response = self._streams.remote(Routed(payload, route))
        try:
            async for message in response:
                yield message
        except Exception as error:  # Ray's, Serve's and gRPC's: the replica has ended, or there is none
            raise ReplicaLostError(f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            response.cancel()  # without effect if it has ended

    async def ask(self, payload: bytes, timeout_s: float, *, needs_all: bool) -> list[Answer]:
        num_late = 0 if needs_all else self.num_silent
        found, errors = await broadcast(self._handle, "ask", timeout_s, payload, num_late=num_late)
        return [answers.decode(each) for each in found] + [Answer(UNKNOWN, error=error) for error in errors]

    async def introduce(self) -> list[Introduction]:
        found, errors = await broadcast(self._handle, "introduce", LOOK_S, num_late=self.num_silent)
        self.num_silent = len(errors)
        return [introductions.decode(each) for each in found]

    async def states(self) -> list[ReplicaState]:
        """The states of the serving replicas; raises as introduce() does."""
        return [states.decode(each) for each in (await broadcast(self._handle, "state", LOOK_S))[0]]


class HttpReplica:
    """The replica of the HTTP application. Created and called on its event loop."""

    async def __init__(self, engines: DeploymentHandle, config: bytes, keys: Keys) -> None:  # type: ignore[misc]
        """`config` is an encoded ServeConfig. Waits for the first replica of the engine."""
        settings = msgspec.msgpack.decode(config, type=ServeConfig)
        number = serve.get_replica_context().rank.rank
        log.setup(f"HTTP replica {number}", *settings.logging)
        first = introductions.decode(await engines.introduce.remote())
        resolved = await asyncio.to_thread(_with_files, settings, first.config)
        self._files = await asyncio.to_thread(ModelFiles, settings, resolved)
        self._engines = ServeReplicas(engines)
        self._session = ServeSession(self._engines, [first])
        link = EngineLink(self._session, resolved, lambda: str(self._session.dead))
        scoreboard = Scoreboard(max(settings.api_server_count, number + 1), number)
        self._application = Application(settings, keys, link, self._files, scoreboard)
        forever = (self._session.watch(), self._application.watch(), end_without_raylet())
        self._watching = [asyncio.ensure_future(each) for each in forever]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve after __init__."""
        return _with_lifespan(self._application.app)

    async def check_health(self) -> None:
        """Raises EngineDeadError if a task that should run forever has ended."""
        for watch in self._watching:
            if watch.done():
                raise EngineDeadError(f"the HTTP application fails: {watch!r}")

    async def states_of_engines(self) -> bytes:
        """For a replica of the engine that is starting; see catch_up.py."""
        return encode(await self._engines.states())

    async def __del__(self) -> None:
        """Called by Serve when the replica's requests have ended, or timed out."""
        if not hasattr(self, "_watching"):
            return
        self._application.calls.is_draining = True
        for watch in self._watching:
            watch.cancel()
        await self._application.end_runs()
        self._session.close()
        self._application.close()
        self._files.close()


def _with_files(settings: ServeConfig, resolved: ResolvedConfig) -> ResolvedConfig:
    """The engine's config, with this machine's folders if the model or tokenizer comes from the hub."""
    changes: dict[str, Any] = {}
    if hub.is_hub_id(settings.model):
        source = hub.HubSource(settings.model, settings.revision, settings.download_dir)
        changes["model"] = hub.local_folder(source, what="model without weights")
    if settings.tokenizer is not None and hub.is_hub_id(settings.tokenizer):
        source = hub.HubSource(settings.tokenizer, None, settings.download_dir)
        changes["tokenizer"] = hub.local_folder(source, what="tokenizer")
    return msgspec.structs.replace(resolved, **changes)


def _with_lifespan(app: ASGIApp) -> ASGIApp:
    """Answers the lifespan events for which Serve waits; the application starts before and ends after."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        while True:
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    return answering
