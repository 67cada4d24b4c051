"""AsyncClient: many streams over one connection, for asyncio."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from vllm_lite.client.decisions.answers import DecisionOutput
from vllm_lite.client.decisions.methods import DecideOptions, prepare
from vllm_lite.client.engines.any_session import STATS_TIMEOUT_S
from vllm_lite.client.engines.operations import OPERATION_TIMEOUT_S, check_done, operation_of
from vllm_lite.client.engines.session import DEFAULT_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, RECOVERY_TIMEOUT_S, Session
from vllm_lite.client.llm_arguments import AnyStream, raise_errors
from vllm_lite.client.lora import LOAD_TIMEOUT_S, LoRARequest, begin_load, check_loaded
from vllm_lite.client.media.programs import ProgramImages
from vllm_lite.client.outputs import RequestOutput
from vllm_lite.client.pooling import PoolingFactory, PoolingRequestOutput, PoolingStream, by_text, joined
from vllm_lite.client.prompt import PromptLike, encode
from vllm_lite.client.streams.sampling import check_form
from vllm_lite.client.streams.stream import Event, RequestStream, StreamFactory, shows
from vllm_lite.client.text.tokenizer import LONG_TEXT_CHARS
from vllm_lite.client.token_classes import BACKGROUND, EntityFinder, classified, texts_of
from vllm_lite.errors import EngineError, RequestError, VllmLiteError
from vllm_lite.protocol.api import PrefixCacheReset, Welcome
from vllm_lite.protocol.operations import PauseMode
from vllm_lite.protocol.params import MAX_SAMPLES, SamplingParams
from vllm_lite.protocol.pooling import PoolingParams, PoolingTask
from vllm_lite.protocol.stats import Stats
from vllm_lite.transport import KeysOption

if TYPE_CHECKING:  # Jinja and Pillow are imported when they are needed
    from vllm_lite.client.chat import ChatTokenizer

A = TypeVar("A")


class _Inbox:
    """Queue of one stream's events from the session's thread to the task that reads them."""

    __slots__ = ("_arrived", "_events")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        """Wait for at least one event, and return all that have arrived. The session guarantees that streams end."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


@dataclass(frozen=True, slots=True)
class _Link:
    """The parts of a connected client."""

    session: Session
    streams: StreamFactory
    loop: asyncio.AbstractEventLoop


class ClientOptions(TypedDict, total=False):
    """The optional parameters of AsyncClient."""

    tokenizer: str | Path | None
    model: str | None
    timeout_s: float
    heartbeat_timeout_s: float
    recovery_timeout_s: float
    keys: KeysOption


class AsyncClient:
    """A client of a running engine, for one event loop.

    Either `async with AsyncClient(address) as client`, or `client = await AsyncClient.connect(address)` with
    `await client.close()` at the end.
    """

    def __init__(  # noqa: PLR0913 - all but the first have defaults
        self,
        address: str,
        *,
        tokenizer: str | Path | None = None,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        recovery_timeout_s: float = RECOVERY_TIMEOUT_S,
        keys: KeysOption = None,
    ) -> None:
        """`tokenizer`: folder with tokenizer.json (default: the engine's). `model`: refuse an engine that serves
        another one. `timeout_s`: maximum time for the engine to load. An engine with requests that is silent for
        `heartbeat_timeout_s` counts as dead; its streams pause for at most `recovery_timeout_s`, until the engine that
        replaces it has loaded (0: they end at once). `keys`: the folder that `vllm-lite keys` made for this client
        (default: VLLM_LITE_KEYS), which a tcp address needs, or False for no encryption."""
        self.address = address
        self._tokenizer = tokenizer
        connect = partial(Session.connect, address, model=model, timeout_s=timeout_s, keys=keys)
        self._connect = partial(connect, heartbeat_timeout_s=heartbeat_timeout_s, recovery_timeout_s=recovery_timeout_s)
        self._opening = asyncio.Lock()
        self._link: _Link | None = None
        self._inboxes: dict[str, _Inbox] = {}
        self._streams: dict[str, AnyStream] = {}
        self._images = ProgramImages()

    @classmethod
    async def connect(cls, address: str, **options: Unpack[ClientOptions]) -> "AsyncClient":
        """Create a client with the parameters of AsyncClient, and connect it. Raises EngineError, ModelError for a bad
        tokenizer, or ConfigError for missing keys."""
        return await cls(address, **options).__aenter__()

    async def __aenter__(self) -> Self:
        async with self._opening:
            if self._link is None:
                self._link = await asyncio.to_thread(self._open, asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort all requests and disconnect; streams that are still read end with EngineError."""
        if self._link is not None:
            await asyncio.to_thread(self._link.session.close)
        self._images.close()

    @property
    def engine(self) -> Welcome:
        """The engine's description: model, limits, number and size of its KV blocks."""
        return self._connected().session.welcome

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded LoRA adapters."""
        return list(self._connected().session.adapters)

    async def get_tokenizer(self) -> "ChatTokenizer":
        """The tokenizer that generate() uses: encode, decode, apply_chat_template. Raises ModelError."""
        from vllm_lite.client.chat import ChatTokenizer

        return ChatTokenizer(self._connected().streams.tokenizer, self._folder, self.engine.eos_token_ids)

    @property
    def _folder(self) -> str | Path:
        """Folder of the tokenizer: the given one, or the engine's."""
        return self._tokenizer or self.engine.tokenizer or self.engine.model

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue `prompt`, in any form that LLM.generate() accepts. Each output has all text and tokens so far, or
        those of the sampling params' `output_kind`. The last one has `finished` set. `lora_request` names an adapter,
        which is loaded if necessary.

        With `best_of` or beam search there is one output, at the end. Closing the iterator, or cancelling the task that
        reads it, aborts the request. Raises RequestError if the request is invalid or fails, EngineDeadError if the
        engine dies and is not replaced.
        """
        request_id = request_id or os.urandom(12).hex()
        stream = await self._make(prompt, sampling_params, request_id)
        if lora_request is not None:
            stream.adapter = await self._load(lora_request)
        async with aclosing(self._follow(stream)) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Run a task of the model's pooler on `prompt`: `pooling_task`, that of the params, or the pooler's first task.
        There is one output. Closing the iterator aborts the request. Raises like generate()."""
        factory, params = self._pooling(), pooling_params or PoolingParams()
        task = pooling_task or params.task or factory.first_task
        make = partial(factory.make, [prompt], params, task, [request_id or os.urandom(12).hex()])
        (stream,) = await self._pooled(await _made(make, prompt), lora_request)
        yield stream.output()

    async def token_classify(
        self,
        texts: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        aggregation: str | None = None,
        ignore_labels: Sequence[str] = BACKGROUND,
        stride: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput]:
        """Find the entities of each text, as LLM.token_classify() does. Cancelling the task aborts all of them."""
        factory, several = self._pooling(), texts_of(texts)
        finder = EntityFinder(self.engine.pooler, factory.tokenizer, aggregation, ignore_labels)
        ids = [os.urandom(12).hex() for _ in several]
        make = partial(factory.make_placed, several, pooling_params or PoolingParams(), stride, ids)
        streams = await self._pooled(await _made(make, *several), lora_request)
        return await asyncio.to_thread(lambda: [classified(stream, finder) for stream in streams])

    async def decide(
        self,
        state: Any,
        questions: Mapping[str, Any],
        *,
        lora_request: LoRARequest | None = None,
        **options: Unpack[DecideOptions],
    ) -> DecisionOutput:
        """Answer questions about `state`, as LLM.decide() does. Cancelling the task aborts all of them."""
        tokenizer, factory, name = await self.get_tokenizer(), self._connected().streams, os.urandom(12).hex()
        ids = (f"{name}-{number}" for number in count())
        reads = await asyncio.to_thread(prepare, factory, tokenizer, state, questions, options, ids)
        adapter = "" if lora_request is None else await self._load(lora_request)
        for stream in reads.streams:
            stream.adapter = adapter
        first, *others = reads.streams
        await self._finish(first)
        if first.error is None:
            await self._finish_all(others)
        return reads.output()

    async def fork(
        self, request_id: str, n: int = 1, sampling_params: SamplingParams | None = None
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """Fork a request of this client that is being read, after the tokens that its reader has seen so far.

        Each of the `n` iterators begins with these tokens and continues with its own seed; its outputs include them,
        and `max_tokens` counts them. The request itself continues unchanged. `sampling_params` default to the
        request's; a seed given there is that of the first fork, the others add 1, 2, ... . Request and forks have one
        sample each (n=1). Raises RequestError.
        """
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            await asyncio.to_thread(check_form, sampling_params)  # checks it, and caches the grammar
        parent = self._streams.get(request_id)
        if parent is None or parent.finished or isinstance(parent, PoolingStream):
            raise RequestError(
                f"request {request_id!r} is not running; only a request that is being read can be forked"
            )
        if not isinstance(n, int) or not 1 <= n <= MAX_SAMPLES:
            raise RequestError(f"n must be an integer between 1 and {MAX_SAMPLES}, got {n!r}")
        make = self._connected().streams.fork
        streams = [make(parent, sampling_params, os.urandom(12).hex(), number) for number in range(n)]
        forks = [self._follow(stream, is_fork=True) for stream in streams]
        try:
            for fork in forks:
                await anext(fork)  # sends it; from here on closing the iterator aborts the fork
        except BaseException:
            for fork in forks:
                await fork.aclose()
            raise
        return forks

    async def abort(self, request_id: str, samples: Sequence[int] = ()) -> None:
        """End a request, or only its `samples`, with finish_reason "abort"; its other samples continue.

        Unknown ids are ignored; beams only end together.
        """
        self._connected().session.abort(request_id, samples)

    async def stats(self) -> Stats:
        """The engine's counters. Raises EngineError if it does not answer in time."""
        return await self._answer(self._connected().session.request_stats())

    async def reset_prefix_cache(self, *, stored: bool = False) -> PrefixCacheReset:
        """Empty the prefix cache, with `stored` also the one on disk; running requests keep their KV. Raises
        EngineError if the engine does not answer in time."""
        return await self._answer(self._connected().session.reset_prefix_cache(stored=stored))

    async def load_adapter(self, name: str, path: str | Path, *, in_place: bool = False) -> None:
        """Load the LoRA adapter in folder `path` of the engine's host; with `in_place` it may replace one of the same
        name. Raises RequestError, in one sentence, if it cannot be served."""
        asked = self._connected().session.load_adapter(name, str(path), in_place=in_place)
        check_loaded(await self._answer(asked, LOAD_TIMEOUT_S))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its requests continue. Raises RequestError if there is none of that name."""
        check_loaded(await self._answer(self._connected().session.unload_adapter(name)))

    # ---- the engine itself, by vLLM's names

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause the engine until resume_generation(); new requests wait. Live ones are ended ("abort"), waited for
        ("wait"), or continue later ("keep"). Raises EngineError if that fails."""
        await self._operate("pause", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Let a paused engine continue."""
        await self._operate("resume")

    async def is_paused(self) -> bool:
        """Whether the engine computes nothing because it is paused or asleep."""
        return (await self.stats()).rests

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Release the memory of weights and KV cache until wake_up(); new requests wait."""
        await self._operate("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let a sleeping engine load the model again and continue; with `tags`, once "weights" and "kv_cache" have both
        been given."""
        await self._operate("wake_up", tags=tags or ())

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return (await self.stats()).sleep_level is not None

    async def update_weights(self, model: str | Path, mode: PauseMode = "wait") -> None:
        """Serve the weights in another folder, of the same model trained further. Raises RequestError if the folder
        cannot be served; then the previous weights are served again."""
        await self._operate("update_weights", model=str(model), mode=mode)

    async def start_profile(self) -> None:
        """Let the workers profile their steps, by profiler_config. Raises RequestError without one."""
        await self._operate("start_profile")

    async def stop_profile(self) -> None:
        """End the profile, and let the workers write it."""
        await self._operate("stop_profile")

    # ---- inside

    async def _operate(self, name: str, **values: object) -> None:
        asked = self._connected().session.operate(operation_of(name, **values))
        check_done(await self._answer(asked, OPERATION_TIMEOUT_S))

    async def _load(self, request: LoRARequest) -> str:
        if (asked := begin_load(self._connected().session, request)) is not None:
            check_loaded(await self._answer(asked, LOAD_TIMEOUT_S))
        return request.lora_name

    def _pooling(self) -> PoolingFactory:
        link = self._connected()
        return PoolingFactory(link.session.welcome, link.streams.tokenizer)

    async def _pooled(self, streams: list[PoolingStream], lora_request: LoRARequest | None) -> list[PoolingStream]:
        """Run the streams of several texts, windows of long ones included, together. Returns one per text."""
        adapter = "" if lora_request is None else await self._load(lora_request)
        for stream in streams:
            stream.adapter = adapter
        await self._finish_all(streams)
        whole = await asyncio.to_thread(lambda: [joined(own) for own in by_text(streams)])
        raise_errors(whole)
        return whole

    async def _finish_all(self, streams: Sequence[AnyStream]) -> None:
        """Run streams together, each to its end. Cancelling it aborts them."""
        tasks = [asyncio.ensure_future(self._finish(stream)) for stream in streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _finish(self, stream: AnyStream) -> None:
        """Run a stream to its end; `error` is set if it failed."""
        async with aclosing(self._follow(stream)) as outputs:
            try:
                async for _ in outputs:
                    pass
            except VllmLiteError:
                if stream.error is None:
                    raise

    async def _answer(self, asked: Future[A], timeout_s: float = STATS_TIMEOUT_S) -> A:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), timeout_s)
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.address} did not answer within {timeout_s:g} s") from error

    async def _follow(self, stream: Any, *, is_fork: bool = False) -> AsyncGenerator[Any, None]:
        """Send the request and yield its outputs. The first output of a fork has its inherited tokens."""
        session, request_id = self._connected().session, stream.request_id
        if self._connected().loop is not asyncio.get_running_loop():  # where outputs would never arrive
            raise EngineError("this client was connected in another event loop; connect one in this loop")
        if request_id in self._inboxes:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        inbox = self._inboxes[request_id] = _Inbox()
        self._streams[request_id] = stream
        try:
            session.submit(stream.message(), self._arrive, stream.own_message())
            if is_fork:
                yield stream.output()
            while not stream.finished:
                events = await inbox.take()
                for event in events:
                    if stream.starts_again(event, session.is_live):
                        session.submit(stream.message(), self._arrive)
                    else:
                        stream.apply(event)
                stream.settle(session)  # before the output is read
                if stream.error is not None:
                    raise stream.error
                if stream.finished or (not stream.ends_at_once and any(map(shows, events))):
                    yield stream.next_output()
        finally:
            del self._inboxes[request_id], self._streams[request_id]
            session.drop(request_id)

    def _open(self, loop: asyncio.AbstractEventLoop) -> _Link:
        session = self._connect()
        try:
            return _Link(session, StreamFactory.load(session.welcome, self._tokenizer), loop)
        except BaseException:
            session.close()
            raise

    def _connected(self) -> _Link:
        if self._link is None:
            raise EngineError("not connected; use `async with AsyncClient(...)` or `await AsyncClient.connect(...)`")
        return self._link

    async def _make(self, prompt: PromptLike, params: SamplingParams | None, request_id: str) -> RequestStream:
        make = self._connected().streams.make
        if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
            words = partial(encode, tokenizer=self._connected().streams.tokenizer)
            prompt = await asyncio.to_thread(self._images.of_data, prompt, self._folder, words)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if getattr(params, "structured_outputs", None) is not None:  # a large schema takes up to a second
            return await asyncio.to_thread(make, prompt, params, request_id)
        return await _made(partial(make, prompt, params, request_id), text)

    def _arrive(self, events: list[Event]) -> None:
        """Pass events to the event loop, from the session's thread: one call per message, whatever its streams."""
        self._connected().loop.call_soon_threadsafe(self._sort, events)

    def _sort(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.put(event)


async def _made(make: Callable[[], A], *prompts: object) -> A:
    """Call `make`, which reads `prompts`, in a thread if it would block the loop for long."""
    if sum(len(each) for each in prompts if isinstance(each, str)) > LONG_TEXT_CHARS:
        return await asyncio.to_thread(make)
    return make()
