"""DynamoEngine: the interface that a worker of Dynamo calls. It starts one engine, and sends it requests as a client.

If this worker dies, a frontend with --migration-limit sends the request to another worker, as the prompt and the tokens
so far. Random draws depend on the seed and on a token's position, so with a seed, or greedily, the tokens are the same
as they would have been here.
"""

import asyncio
import os
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from vllm_lite.client.async_client import AsyncClient
from vllm_lite.client.engines.connection import RUN_DIR
from vllm_lite.client.engines.launch import LaunchedEngine, launch, resolve
from vllm_lite.client.generation_config import generation_defaults
from vllm_lite.config import EngineConfig
from vllm_lite.dynamo import mapping, settings
from vllm_lite.errors import EngineDeadError, EngineError, RequestError
from vllm_lite.runtime import log
from vllm_lite.runtime.nested_settings import KVEventsConfig
from vllm_lite.server.config import ServeConfig

SNAPSHOT_S = 1.0
"""Seconds between reports of the KV cache's usage to the router."""
WAIT_S = 60.0

logger = log.get(__name__)


class DynamoEngine(LLMEngine):  # type: ignore[misc]
    """One engine with its workers. Every method runs in the event loop of Dynamo's worker."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._folder: TemporaryDirectory[str] | None = None
        self._launched: LaunchedEngine | None = None
        self._client: AsyncClient | None = None
        self._defaults: dict[str, Any] = {}
        self._requests: defaultdict[str, set[str]] = defaultdict(set)
        """The engine's ids of running requests, by Dynamo's id, which it may use again for a repeated request."""
        self._snapshots: asyncio.Task[None] | None = None
        self._publisher: Any = None
        self._is_closing = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["DynamoEngine", WorkerConfig]:
        """Read the command line, and check the model, so that the user gets errors here, in one sentence. Raises
        ConfigError or ModelError."""
        config, runtime = settings.read(argv)
        log.setup("dynamo worker", *config.logging)
        resolved = await asyncio.to_thread(resolve, config.engine())
        names = {"model_name": resolved.model, "served_model_name": resolved.served_model_name}
        return cls(config), WorkerConfig.from_runtime_config(runtime, **names)

    async def start(self, worker_id: int) -> Registration:  # noqa: ARG002 - Dynamo's
        """Start the engine and wait until it serves. Raises EngineError, ModelError or ConfigError."""
        config = self._engine_config()
        self._launched = launched = await asyncio.to_thread(launch, config)
        threading.Thread(target=self._end_with, args=(launched,), name="engine's end", daemon=True).start()
        resolved = launched.config
        self._defaults = generation_defaults(
            resolved.model, self._config.generation_config, self._config.override_generation_config
        ).params
        self._client = await AsyncClient.connect(
            launched.address,
            tokenizer=config.tokenizer,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            recovery_timeout_s=config.recovery_timeout_s,
        )
        engine = self._client.engine
        return Registration(
            model=resolved.model,
            served_model_name=resolved.served_model_name,
            model_aliases=list(self._config.names[1:]),
            llm=LlmRegistration(
                context_length=engine.max_model_len,
                kv_cache_block_size=engine.block_size,
                total_kv_blocks=engine.num_blocks,
                max_num_seqs=resolved.max_num_seqs,
                max_num_batched_tokens=resolved.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        client, request_id, chunks = self._connected(), os.urandom(12).hex(), mapping.Chunks()
        running = self._requests[context.id()]
        running.add(request_id)
        try:
            params = mapping.sampling_params(request, self._defaults)
            async with aclosing(client.generate(request["token_ids"], params, request_id)) as outputs:
                async for output in outputs:
                    for chunk in chunks.of(output):
                        yield chunk
        except RequestError as error:
            raise InvalidArgument(str(error)) from error
        except EngineError as error:
            if isinstance(error, EngineDeadError):  # and no other engine came within recovery_timeout_s
                self._end(str(error))
            raise EngineShutdown(str(error)) from error  # the frontend then tries another worker
        finally:
            running.discard(request_id)
            if not running:
                self._requests.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        """Abort the requests under the context's id; their KV blocks are freed at once."""
        for request_id in tuple(self._requests.get(context.id(), ())):
            await self._connected().abort(request_id)

    async def cleanup(self) -> None:
        self._is_closing = True
        if self._snapshots is not None:
            self._snapshots.cancel()
        if self._client is not None:
            await self._client.close()
        if self._launched is not None:
            await asyncio.to_thread(self._launched.close)
        if self._folder is not None:
            self._folder.cleanup()
        self._client = self._launched = self._folder = self._snapshots = None

    # ---- for routers

    async def kv_event_sources(self) -> list[KvEventSource]:
        events = self._launched.config.kv_events_config if self._launched is not None else None
        if events is None or not events.enabled or events.endpoint is None:
            return []
        return [ZmqSource(events.endpoint, events.topic)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def on_endpoint_ready(self, endpoint: Any) -> None:  # noqa: ARG002 - Dynamo's
        self._snapshots = asyncio.create_task(self._publish_snapshots())

    async def health_check_payload(self) -> dict[str, Any] | None:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    # ---- inside

    def _engine_config(self) -> EngineConfig:
        """The engine's settings. With a prefix cache it publishes KV events, by default to a private socket. Dynamo
        expects hashes as integers, and reads cache salts only from events encoded as maps."""
        config, events = self._config.engine(), self._config.kv_events_config
        if events is None and config.enable_prefix_caching:
            self._folder = TemporaryDirectory(prefix=RUN_DIR)
            endpoint = f"ipc://{Path(self._folder.name, 'kv-events')}"
            events = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
        if events is not None:
            events = msgspec.structs.replace(events, hash_format="int", event_format="map")
        return msgspec.structs.replace(config, kv_events_config=events)

    async def _publish_snapshots(self) -> None:
        while self._publisher is not None:
            with suppress(EngineError):  # the engine is being replaced
                stats = await self._connected().stats()
                used, blocks = stats.num_used_blocks, stats.num_blocks
                hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else None
                self._publisher.publish(0, ComponentSnapshot(used, blocks, used / max(1, blocks), 0, hits))
            await asyncio.sleep(SNAPSHOT_S)

    def _connected(self) -> AsyncClient:
        if self._client is None:
            raise EngineShutdown("the engine has not started, or has ended")
        return self._client

    def _end_with(self, launched: LaunchedEngine) -> None:
        """End this worker gracefully when its engine has ended for good, so that routers send it no more requests."""
        while not launched.wait(WAIT_S):
            pass
        self._end(launched.reason)

    def _end(self, reason: str) -> None:
        if not self._is_closing:
            self._is_closing = True
            logger.error("the worker ends: %s", reason)
            os.kill(os.getpid(), signal.SIGTERM)
