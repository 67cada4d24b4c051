"""ServeSession: the HTTP application's session with all replicas of the engine. No ray.

A stream is kept here, with all the tokens delivered, while its connection is open: a replica has no state that is not
here as well. So if its replica is lost, another one continues after these tokens, with the same random draws.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import reduce
from itertools import count
from operator import itemgetter
from typing import Protocol, TypeVar

import msgspec

from vllm_lite.client.engines.any_session import AnySession, Member
from vllm_lite.client.engines.data_parallel import prompt_hashes
from vllm_lite.client.engines.joined_answers import joined
from vllm_lite.client.engines.session import MAX_MOVES
from vllm_lite.client.streams.open_stream import OpenStream, Sink
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.errors import EngineDeadError, EngineError, RequestError, VllmLiteError
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo
from vllm_lite.protocol.api import Dying, ForkRequest, FromClient, Generate, GetStats, OutputBatch, Welcome
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.protocol.operations import OperationDone
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.view import EngineView, GetView
from vllm_lite.ray.messages import HASH_BYTES, Answer, Introduction, Route
from vllm_lite.runtime import log
from vllm_lite.runtime.prefix_hash import PrefixHasher

LOOK_S = 1.0
ANSWER_S, OPERATION_S = 4.0, 3600.0
"""Timeouts of answers: to questions, and to operations that wait for requests to end or for weights."""
NO_ANSWER = "a replica did not answer"
_GET_STATS = GetStats()
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""First and maximum pause before a stream tries again to find a replica."""

A = TypeVar("A")
T = TypeVar("T")
logger = log.get(__name__)


class ReplicaLostError(EngineDeadError):
    """A replica has ended, or does not answer; another one may still serve."""


class Replicas(Protocol):
    """The engine's replicas, independent of Ray."""

    def generate(self, payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
        """Send an encoded Generate to one replica. Yields "" once a replica has accepted it, then encoded messages of
        its engine, and "" as a sign of life. Raises ReplicaLostError."""

    num_silent: int
    """Number of replicas that did not answer the last introduce()."""

    async def ask(self, payload: bytes, timeout_s: float, *, needs_all: bool) -> list[Answer]:
        """The answers of all replicas to an encoded message, an error for each that does not answer. Replicas that are
        already silent are not awaited, unless `needs_all`. Raises ReplicaLostError if no answer comes in time."""

    async def introduce(self) -> list[Introduction]:
        """Introductions of all replicas; raises as ask() does."""


class ServeSession(AnySession):
    """A session with replicas. Every method is called on the event loop of watch()."""

    def __init__(self, replicas: Replicas, known: Sequence[Introduction]) -> None:
        """`known`: the replicas that serve so far, at least one."""
        self.address = "Ray Serve"
        self._replicas = replicas
        self.known = list(known)
        self._lost_since_s: float | None = None
        self._dead: EngineError | None = None
        config, welcome = known[0].config, known[0].welcome
        self._hasher = PrefixHasher(welcome.block_size, config.prefix_hash_seed)
        self.silence_s, self.recovery_s = config.heartbeat_timeout_s, config.recovery_timeout_s
        self._open: dict[str, OpenStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._untaken: dict[asyncio.Timeout, float] = {}
        """Timeouts of requests that no replica has accepted yet, with their start times."""
        self._names = (f"{os.urandom(8).hex()}-{number}" for number in count())
        """Request ids in the replicas, distinct from other servers'."""

    # ---- state

    @property
    def welcome(self) -> Welcome:
        shortest = min(each.welcome.max_model_len for each in self.known)
        return msgspec.structs.replace(self.known[0].welcome, max_model_len=shortest)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        first, *others = [{info.name: info for info in each.adapters} for each in self.known]
        return {name: info for name, info in first.items() if all(name in other for other in others)}

    @property
    def num_engines(self) -> int:
        return len(self.known)

    @property
    def dead(self) -> EngineError | None:
        return self._dead

    @property
    def recovering(self) -> str | None:
        if self._lost_since_s is not None:
            return "no replica serves at present"
        pauses = [each.recovering for each in self.known]
        return pauses[0] if all(pauses) else None

    async def watch(self) -> None:
        """Poll the replicas until cancelled, and end streams that have waited too long for one."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.known = await self._replicas.introduce()
                self._lost_since_s = None
                self._look_at_untaken()
            except ReplicaLostError as error:
                self._lost_since_s = self._lost_since_s or time.monotonic()
                if time.monotonic() - self._lost_since_s > self.recovery_s:
                    late = EngineDeadError(f"no replica has come within {self.recovery_s:g} s: {error}")
                    for request_id in list(self._open):
                        self._end(request_id, late)
            self._end_late()

    # ---- messages to replicas

    def ask(self, message: FromClient, answer: type[A]) -> "Future[A]":
        """Ask all replicas, and join their answers."""
        future: Future[A] = Future()
        asked = asyncio.ensure_future(self._ask(message, answer))
        asked.add_done_callback(lambda done: _resolve(future, done, lambda found: reduce(joined, found.values())))
        return future

    def ask_one(self, number: int, message: FromClient, answer: type[A]) -> "Future[A]":
        if number not in {each.number for each in self.known}:
            raise LookupError(number)
        return _of(number, asyncio.ensure_future(self._ask(message, answer)))

    def ask_each(self, first_block: int | None = None) -> list[Member]:
        asked = asyncio.ensure_future(self._ask(_GET_STATS, Stats))
        viewed = None if first_block is None else asyncio.ensure_future(self._ask(GetView(first_block), EngineView))

        def one(known: Introduction) -> Member:
            view = None if viewed is None else _of(known.number, viewed)
            return Member(known.number, known.welcome, _of(known.number, asked), view)

        return [one(each) for each in sorted(self.known, key=lambda known: known.number)]

    async def _ask(self, message: FromClient, answer: type[A]) -> dict[int, A]:
        """Answers by the replica's number. Raises EngineError if none answers as expected, or not all do an
        operation."""
        is_change = answer in (AdapterAnswer, OperationDone)
        timeout_s = OPERATION_S if is_change else ANSWER_S
        found, errors = {}, []
        for each in await self._replicas.ask(client_to_engine.encode(message), timeout_s, needs_all=is_change):
            content = engine_to_client.decode(each.payload) if each.payload else None
            if isinstance(content, answer):
                found[each.number] = content
            else:
                errors.append(each.error or NO_ANSWER)
        if not found or (answer is OperationDone and (errors or len(found) < len(self.known))):
            raise EngineError(errors[0] if errors else NO_ANSWER)
        if answer is AdapterAnswer:  # requests may name the adapter, or no longer, once the caller has the answer
            self.known = await self._replicas.introduce()
        return found

    # ---- streams

    def submit(
        self, message: Generate | ForkRequest, sink: Sink, own: Generate | None = None, affinity: str | None = None
    ) -> None:
        """A fork is sent as a separate request: its parent's replica may have ended, and prefix caches have the
        parent's KV."""
        if self._dead is not None:
            raise self._dead
        request_id = message.child_id if isinstance(message, ForkRequest) else message.request_id
        if request_id in self._open:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        stream = self._open[request_id] = OpenStream(message, sink, own)
        task = asyncio.ensure_future(self._carry(request_id, stream, affinity))
        self._tasks[request_id] = task
        task.add_done_callback(
            lambda _: self._tasks.pop(request_id, None) if self._tasks.get(request_id) is task else None
        )

    def is_live(self, request_id: str) -> bool:
        return request_id in self._open

    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None:  # noqa: ARG002
        """End a request, or some of its samples, here; the replica is informed once all have ended."""
        stream = self._open.get(request_id)
        if stream is not None and stream.abort(samples) is not None:
            self._end_here(request_id, stream)

    def drop(self, request_id: str, *, stopped: bool = False) -> None:  # noqa: ARG002
        if self._open.pop(request_id, None) is not None:
            self._tasks.pop(request_id).cancel()

    def close(self) -> None:
        self._dead = EngineError("the client was closed")
        for request_id in list(self._open):
            self._end(request_id, self._dead)

    async def _carry(self, request_id: str, stream: OpenStream, affinity: str | None) -> None:
        """Run a stream on one replica after another, until it has ended."""
        pause_s = FIRST_PAUSE_S
        try:
            while self._open.get(request_id) is stream:
                again = stream.again(request_id)
                if not isinstance(again, Generate):
                    return self._deliver(request_id, stream, [again])
                num_moves = stream.num_moves
                try:
                    await self._follow(request_id, stream, again, affinity)
                except ReplicaLostError as error:
                    if stream.num_moves > MAX_MOVES:
                        return self._end(request_id, error)
                    delivered = sum(map(len, stream.tokens.values()))
                    logger.warning("request %s lost its replica after %d tokens: %s", request_id, delivered, error)
                    if stream.num_moves == num_moves:  # no replica accepted it
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, MAX_PAUSE_S)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            self._end(request_id, EngineError(f"the server failed: {error!r}"))

    async def _follow(self, request_id: str, stream: OpenStream, request: Generate, affinity: str | None) -> None:
        """Run a stream on one replica. Raises ReplicaLostError if the replica ends, or is silent, before the stream has
        ended."""
        blocks = tuple(block[:HASH_BYTES] for block in prompt_hashes(self._hasher, request))
        route = Route(blocks, affinity or request.params.cache_salt)
        payload = client_to_engine.encode(msgspec.structs.replace(request, request_id=next(self._names)))
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as silence, aclosing(self._replicas.generate(payload, route)) as messages:
                self._untaken[silence] = clock()
                async for message in messages:
                    if self._untaken.pop(silence, None) is not None:
                        stream.num_moves += 1
                    silence.reschedule(clock() + self.silence_s)
                    if message:
                        self._take(request_id, stream, message)
                    if not stream.tokens:
                        return
        except TimeoutError as error:
            raise ReplicaLostError(f"the replica has been silent for {self.silence_s:g} s") from error
        finally:
            self._untaken.pop(silence, None)
        raise ReplicaLostError("the replica ended a stream that had not ended")

    def _look_at_untaken(self) -> None:
        """Route again the requests that a silent replica may have got. If none is silent, all are full, and requests
        keep their places in the queue."""
        now_s = asyncio.get_running_loop().time()
        for silence, began_s in list(self._untaken.items()):
            if self._replicas.num_silent and now_s - began_s > self.silence_s:
                del self._untaken[silence]
                silence.reschedule(now_s)

    def _take(self, request_id: str, stream: OpenStream, message: bytes) -> None:
        """Deliver a replica's message. Raises ReplicaLostError if its engine has ended."""
        content = engine_to_client.decode(message)
        if isinstance(content, Dying):
            raise ReplicaLostError(content.reason)
        if isinstance(content, OutputBatch):
            outputs = [msgspec.structs.replace(output, request_id=request_id) for output in content.outputs]
            self._deliver(
                request_id, stream, [event for output in outputs if (event := stream.take(output)) is not None]
            )

    def _deliver(self, request_id: str, stream: OpenStream, events: list[Event]) -> None:
        if any(isinstance(event, StreamFailure) for event in events):
            stream.tokens.clear()
        if not stream.tokens and self._open.get(request_id) is stream:
            del self._open[request_id]
        if events:
            stream.sink(events)

    def _end_here(self, request_id: str, stream: OpenStream) -> None:
        """Deliver the ends of samples that were aborted or timed out."""
        if events := stream.end_here(request_id):
            self._deliver(request_id, stream, events)
            if not stream.tokens and (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    def _end_late(self) -> None:
        for request_id, stream in list(self._open.items()):
            self._end_here(request_id, stream)

    def _end(self, request_id: str, error: VllmLiteError) -> None:
        if (stream := self._open.get(request_id)) is not None:
            self._deliver(request_id, stream, [StreamFailure(request_id, error)])


def _of(number: int, answers: "asyncio.Future[dict[int, A]]") -> "Future[A]":
    future: Future[A] = Future()
    answers.add_done_callback(lambda done: _resolve(future, done, itemgetter(number)))
    return future


def _resolve(future: "Future[A]", done: "asyncio.Future[dict[int, T]]", read: Callable[[dict[int, T]], A]) -> None:
    """Resolve `future` with the answer, or with the error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(read(done.result()))
    except KeyError:
        future.set_exception(EngineError("the replica did not answer"))
    except (asyncio.CancelledError, Exception) as error:
        future.set_exception(
            error if isinstance(error, VllmLiteError) else EngineError(f"nothing was answered: {error!r}")
        )
