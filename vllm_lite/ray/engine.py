"""EngineReplica: one engine with its own workers, as a replica of Ray Serve.

The engine is supervised as in `serve`: workers and engines that die are replaced, and streams continue. If that fails,
the replica is unhealthy, and Serve starts another one.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from ray import serve
from ray.serve.metrics import Gauge

from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.client.streams.stream import Event, StreamFailure, is_error
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineError, VllmLiteError
from vllm_lite.protocol import api
from vllm_lite.protocol.adapters import AdapterAnswer, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.api import Dying, Finished, FromClient, Generate, OutputBatch, Tokens
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, FindExternal
from vllm_lite.protocol.operations import OperationDone
from vllm_lite.protocol.stats import Stats
from vllm_lite.ray.broadcast import broadcast
from vllm_lite.ray.catch_up import Memory, ReplicaState, steps, take
from vllm_lite.ray.config import KV_CACHE_USAGE
from vllm_lite.ray.messages import HTTP_DEPLOYMENT, Answer, Introduction, encode
from vllm_lite.ray.orphan import end_without_raylet
from vllm_lite.ray.reported_blocks import ReportedBlocks, can_follow, private_endpoint
from vllm_lite.ray.session import ReplicaLostError
from vllm_lite.runtime import log
from vllm_lite.runtime.nested_settings import KVEventsConfig
from vllm_lite.transport.subscriber import Subscriber

LOOK_S = 10.0
"""Timeout for the HTTP replicas to ask the other replicas."""
HEALTH_S = 5.0
"""Timeout of the engine's statistics; it answers during steps, too."""
LIFE_S = 5.0
"""Longest time between messages of a stream from a live replica."""
CHUNK_S, MAX_PAUSE_S = 0.0001, 0.03
"""Pause between messages of a stream, per stream of the replica, and its maximum: a message costs 0.1 ms."""


def kv_cache_usage(stats: Stats) -> float:
    """The fraction of the KV blocks that live sequences use."""
    return stats.num_used_blocks / max(1, stats.num_blocks)


GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm_lite_requests_running": ("Requests in the batch.", lambda stats: stats.num_running),
    "vllm_lite_requests_waiting": ("Requests that wait for a place in it.", lambda stats: stats.num_waiting),
    "vllm_lite_kv_cache_usage": ("Share of the KV blocks that live sequences hold.", kv_cache_usage),
    "vllm_lite_prompt_tokens": ("Prompt tokens so far.", lambda stats: stats.prompt_tokens),
    "vllm_lite_cached_tokens": ("Those of them found in the prefix cache.", lambda stats: stats.cached_tokens),
    "vllm_lite_generated_tokens": ("Tokens generated so far.", lambda stats: stats.generated_tokens),
}
"""Metrics that Ray exports for each replica, beside the HTTP application's own /metrics."""

logger = log.get(__name__)


class EngineReplica:
    """The replica of an engine. All methods run on the replica's event loop."""

    async def __init__(self, config: bytes) -> None:  # type: ignore[misc]
        """`config` is an encoded EngineConfig. Raises VllmLiteError if the engine cannot start; Serve tries again."""
        self._number = serve.get_replica_context().rank.rank
        settings = msgspec.msgpack.decode(config, type=EngineConfig)
        log.setup(f"replica {self._number}", *settings.logging)
        events = _events(settings, self._number)
        settings = msgspec.structs.replace(settings, kv_events_config=events)
        self._loop = asyncio.get_running_loop()
        self._inboxes: dict[str, _Inbox] = {}
        self._launched: LaunchedEngine = await asyncio.to_thread(launch, settings)
        self._session = self._launched.session
        self._cached = ReportedBlocks(self._session.welcome.num_blocks)
        if can_follow(events) and events.endpoint is not None:
            self._cached.follow(Subscriber(events.endpoint))
        self._watching = asyncio.ensure_future(end_without_raylet())
        self._memory = Memory(self._number, await self._stats())
        self._num_checks = 0
        await self._catch_up()
        self._gauges = {name: Gauge(name, description=text) for name, (text, _) in GAUGES.items()}

    # ---- for Serve

    async def check_health(self) -> None:
        """Raises EngineError if the engine has ended or does not answer. While the engine or its workers are being
        replaced, the replica counts as healthy; that has its own timeouts."""
        if (dead := self._session.dead) is not None:
            raise dead
        self._num_checks += 1
        if self._num_checks == 2:  # the first check is before the replica serves
            self._catching_up = asyncio.ensure_future(self._catch_up())
        if self._session.recovering is None:
            stats = await self._stats()
            for name, (_, read) in GAUGES.items():
                self._gauges[name].set(read(stats))

    def record_routing_stats(self) -> dict[str, Any]:
        """A summary of this replica's cache for the routers."""
        return self._cached.summary().to_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for the autoscaler beside the number of requests; none while the engine is being replaced."""
        if self._session.dead is not None or self._session.recovering is not None:
            return {}
        return {KV_CACHE_USAGE: kv_cache_usage(await self._stats())}

    async def __del__(self) -> None:
        """Called by Serve when the replica's requests have ended, or timed out."""
        if hasattr(self, "_cached"):
            self._cached.close()
        if hasattr(self, "_launched"):
            await asyncio.to_thread(self._launched.close)

    # ---- for the HTTP replicas

    async def generate(self, payload: bytes) -> AsyncGenerator[bytes, None]:
        """Run a request. Yields "" when it has been accepted, then the engine's messages; see Replicas.generate()."""
        request = client_to_engine.decode(payload)
        if not isinstance(request, Generate):
            raise VllmLiteError(f"a stream begins with Generate, got {type(request).__name__}")
        inbox = self._inboxes[request.request_id] = _Inbox(len(request.samples) or request.params.n)
        try:
            yield b""
            try:
                self._session.submit(request, self._arrive)
            except EngineError as error:
                yield _dying(error)
                return
            while not inbox.has_ended:
                for message in await inbox.take():
                    yield message
                await asyncio.sleep(min(MAX_PAUSE_S, CHUNK_S * len(self._inboxes)))
        finally:
            del self._inboxes[request.request_id]
            self._session.drop(request.request_id)

    async def introduce(self) -> bytes:
        session = self._session
        adapters = list(session.adapters.values())
        config = self._launched.config
        return encode(Introduction(self._number, config, session.welcome, adapters, session.recovering))

    async def state(self) -> bytes:
        """For a replica that starts; see catch_up.py."""
        return encode(self._memory.state(await self._stats(), list(self._session.adapters.values())))

    async def ask(self, payload: bytes) -> bytes:
        """The engine's answer to a message."""
        try:
            question = client_to_engine.decode(payload)
            answer = await asyncio.wrap_future(self._session.ask(question, _answer_to(question)))
        except EngineError as error:
            return encode(Answer(self._number, error=str(error)))
        return encode(Answer(self._number, engine_to_client.encode(answer)))

    async def _catch_up(self) -> None:
        """Copy the state of older replicas."""
        with suppress(ReplicaLostError, EngineError):  # there is no other replica, or the engine fails
            others = await _states_of_all()
            own = self._memory.state(await self._stats(), list(self._session.adapters.values()))
            await take(steps(own, others), self._session)

    async def _stats(self) -> Stats:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._session.request_stats()), HEALTH_S)
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer within {HEALTH_S:g} s") from error

    def _arrive(self, events: list[Event]) -> None:
        """Called on the session's thread: one call into the event loop for each message of the engine."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._sort, events)

    def _sort(self, events: list[Event]) -> None:
        for event in events:
            if (inbox := self._inboxes.get(event.request_id)) is not None:
                inbox.put(event)


class _Inbox:
    """Events of one stream that were not sent yet."""

    def __init__(self, num_samples: int) -> None:
        self._events: list[Event] = []
        self._came = asyncio.Event()
        self._num_open = num_samples

    @property
    def has_ended(self) -> bool:
        """Whether the last event has been taken."""
        return self._num_open <= 0

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._came.set()

    async def take(self) -> list[bytes]:
        """All events, as messages; an empty message after LIFE_S without events."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), LIFE_S)
        self._came.clear()
        events, self._events = self._events, []
        if not events:
            return [b""]
        outputs = [event for event in events if isinstance(event, Tokens | Finished)]
        messages = [engine_to_client.encode(OutputBatch(0, outputs))] if outputs else []
        for event in events:
            is_end = isinstance(event, StreamFailure) or is_error(event)  # of all samples
            self._num_open -= self._num_open if is_end else isinstance(event, Finished)
            if isinstance(event, StreamFailure):
                messages.append(_dying(event.error))
        return messages


def _answer_to(question: FromClient) -> type[Any]:
    """Type of the engine's answer to a message; OperationDone for operations."""
    kinds: dict[type[Any], type[Any]] = {
        api.GetStats: Stats,
        api.Describe: api.Descriptions,
        FindExternal: ExternalFound,
        AbortExternal: ExternalAborted,
        api.ResetPrefixCache: api.PrefixCacheReset,
        LoadAdapter: AdapterAnswer,
        UnloadAdapter: AdapterAnswer,
    }
    return kinds.get(type(question), OperationDone)


def _events(settings: EngineConfig, number: int) -> KVEventsConfig:
    """The engine's settings of KV events: the user's, at a separate port for each replica; by default, a socket for
    this replica, which only this user can open and which ends with the engine."""
    wanted = settings.kv_events_config
    if wanted is not None and wanted.enabled:
        if wanted.endpoint is None:
            return msgspec.structs.replace(wanted, endpoint=private_endpoint())
        return wanted.of_engine(number)
    return KVEventsConfig(enable_kv_cache_events=True, endpoint=private_endpoint(), buffer_steps=1)


async def _states_of_all() -> list[ReplicaState]:
    """The states of the serving replicas, asked through the HTTP replicas: a process with a handle of the engines would
    get all replicas' reports of their caches. Raises ReplicaLostError if no HTTP replica serves yet."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(HTTP_DEPLOYMENT, context.app_name)
    found, _ = await broadcast(handle, "states_of_engines", LOOK_S)
    return msgspec.msgpack.decode(found[0], type=list[ReplicaState])


def _dying(error: Exception) -> bytes:
    return engine_to_client.encode(Dying(str(error)))
