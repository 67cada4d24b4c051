"""Calls: the calls that run on this server, and the limits on new ones."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, TypeVar

from vllm_lite.client.engines.any_session import AnySession, Member
from vllm_lite.client.engines.operations import OPERATION_TIMEOUT_S
from vllm_lite.errors import EngineError, VllmLiteError
from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.operations import Operation, OperationDone
from vllm_lite.protocol.stats import Stats
from vllm_lite.server.calls.call import Call, Reading
from vllm_lite.server.calls.dispatcher import Dispatcher
from vllm_lite.server.calls.response import PING_S
from vllm_lite.server.openai.errors import ApiError, in_use, public_text, refused
from vllm_lite.server.processes.scoreboard import Scoreboard

LOOK_S = 0.25
PROBE_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1

A = TypeVar("A")


class QueueLimits(NamedTuple):
    """Bounds on sequences that run and wait on this server: its share of the engine's if there are several servers.

    capacity           sequences in the batch
    max_queued         sequences that may wait for the batch
    max_queued_of_all  waiting sequences of all servers together, by the engine's own count
    max_queued_tokens  prompt tokens of streams without a first token; None = no limit
    """

    capacity: int
    max_queued: int
    max_queued_of_all: int
    max_queued_tokens: int | None = None


class CallObserver(Protocol):
    """Follows each call from its start to its end."""

    def started(self, call: Call) -> None: ...

    def ended(self, call: Call) -> None: ...


class Calls:
    """Holds the calls that run on this server, and decides whether another may start. Every method is called on the
    loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: QueueLimits,
        scoreboard: Scoreboard | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        """`scoreboard` publishes the number of running calls; given if there are several servers."""
        self._observer = observer
        self.dispatcher = dispatcher
        self.scoreboard = scoreboard or Scoreboard()
        self._suffix = f"@{self.scoreboard.number}" if self.scoreboard.number else ""
        self.is_draining = False
        self._limits = limits
        self.num_waiting = self._num_waiting_last = 0
        self.running: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self.running)

    def get(self, name: str) -> Call | None:
        return self.running.get(name)

    @property
    def death(self) -> str | None:
        """The error that ended the engine, None while it is alive."""
        dead = self.dispatcher.session.dead
        return None if dead is None else public_text(dead)

    @property
    def trouble(self) -> str | None:
        """The reason why no request can be served, None if they can."""
        if self.death is not None:
            return self.death
        return "the server is shutting down" if self.is_draining else None

    def check(self, num_new: int = 1) -> None:
        """Raises ApiError if no call of `num_new` sequences may start now."""
        if self.trouble is not None:
            raise ApiError(503, self.trouble)
        limits, here = self._limits, self.dispatcher.num_sequences
        flag, most = f"--max-num-queued-reqs {limits.max_queued_of_all}", limits.capacity + limits.max_queued
        if num_new > most:
            what = f"the request has {num_new} sequences, n for each prompt"
            raise ApiError(400, f"{what}; at most {most} may run and wait here ({flag}): send fewer at a time")
        if here <= limits.max_queued:  # the engine's count is up to two looks old: the queue has emptied since
            self.num_waiting = 0
        waiting = self.num_waiting
        if here + num_new > most or (waiting and waiting + num_new > max(1, limits.max_queued_of_all)):
            raise self._full("max_num_queued_reqs", f"the maximum number of requests is waiting ({flag})")

    def _check_tokens(self, call: Call) -> None:
        """Raise ApiError if the waiting prompts have too many tokens. A call that finds no prompt waiting always
        passes."""
        limit, queued = self._limits.max_queued_tokens, self.dispatcher.num_queued_tokens
        if limit is not None and queued and queued + call.num_prompt_tokens > limit:
            new, flag = call.num_prompt_tokens, f"--max-num-queued-tokens {limit}"
            what = f"prompts of {queued} tokens are waiting, and {new} more are too many ({flag})"
            raise self._full("max_num_queued_tokens", what)

    def _full(self, limit: str, message: str) -> ApiError:
        self.scoreboard.count_rejection(limit)
        return ApiError(429, f"{message}; try again later", headers={"Retry-After": str(RETRY_AFTER_S)})

    @contextmanager
    def run(self, call: Call) -> Iterator[Reading]:
        """Start `call` and read it within the context, then end it. Raises ApiError if it cannot be started."""
        self.start(call)
        try:
            yield call.reading
        finally:
            self.end(call)

    def start(self, call: Call) -> None:
        """Start `call`, which runs until end(). Raises ApiError, without any effect, if it cannot be started."""
        self.check(call.num_sequences)
        self._check_tokens(call)
        if call.name in self.running or self.dispatcher.has_one_of(call):
            raise in_use(call.id)
        self.running[call.name] = call
        self.scoreboard.report_load(len(self.running))
        try:
            self.dispatcher.start(call)
        except BaseException as error:
            self.end(call)
            if isinstance(error, VllmLiteError):
                raise refused(error) from error
            raise
        if self._observer is not None:
            self._observer.started(call)

    def end(self, call: Call) -> None:
        if self.running.get(call.name) is call:
            del self.running[call.name]
            self.scoreboard.report_load(len(self.running))
            if self._observer is not None:
                self._observer.ended(call)
            self.dispatcher.drop(call)

    def stream_ids(self, name: str, count: int) -> list[str]:
        """Request ids in the engine for the streams of the call `name`. They differ from those of other servers, even
        if two servers have a call of one name."""
        names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
        return [each + self._suffix for each in names]

    def abort_all(self) -> None:
        """End all calls at shutdown: a call that has generated tokens is answered with them, another one is refused."""
        for call in self.running.values():
            call.cut_short()
            self.dispatcher.abort(call)

    async def probe(self) -> Stats:
        """Return the engine's counters, as a proof that its loop answers. Raises ApiError if it does not, or if the
        engine or its workers are being replaced; requests that arrive meanwhile wait."""
        if self.trouble is not None:
            raise ApiError(503, self.trouble)
        pause = self.dispatcher.session.recovering
        if pause is None:
            stats = await self.stats()
            pause = stats.recovering or _rest_of(stats)
            if not pause:
                return stats
        raise ApiError(503, public_text(EngineError(f"streams pause: {pause}")))

    async def stats(self) -> Stats:
        """Return the engine's counters, also during shutdown. Raises ApiError if the engine does not answer."""
        return await self.ask(lambda session: session.request_stats())

    async def stats_of_engines(self) -> list[tuple[int, Stats, Welcome]]:
        """Number, counters and Welcome of each engine that answers. Raises ApiError if none does."""
        asked: list[Member] = []
        with suppress(EngineError):
            asked = self.dispatcher.session.ask_each()

        async def one(member: Member) -> Stats:
            return await asyncio.wait_for(asyncio.wrap_future(member.stats), PROBE_TIMEOUT_S)

        answers = await asyncio.gather(*map(one, asked), return_exceptions=True)
        pairs = zip(asked, answers, strict=True)
        found = [(each.number, stats, each.welcome) for each, stats in pairs if isinstance(stats, Stats)]
        if not found:
            await self.stats()  # raises with the reason
        return found

    async def ask(self, question: Callable[[AnySession], Future[A]], timeout_s: float = PROBE_TIMEOUT_S) -> A:
        """The engine's answer to `question`, which sends it through the session. Raises ApiError if none comes."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(question(self.dispatcher.session)), timeout_s)
        except (TimeoutError, EngineError) as error:
            text = public_text(error) if isinstance(error, EngineError) else f"no answer within {timeout_s:g} s"
            raise ApiError(503, text) from error

    async def operate(self, message: Operation) -> OperationDone:
        """The engine's answer to an operation, however long that takes. Raises ApiError if none comes."""
        return await self.ask(lambda session: session.operate(message), OPERATION_TIMEOUT_S)

    async def ask_for_new(self, question: Callable[[AnySession], Future[A]]) -> A:
        """As ask(), for a question that precedes a call. While the engine is being replaced the question waits, as
        calls do. Raises ApiError."""
        while True:
            is_replaced = self.dispatcher.session.recovering is not None
            try:
                return await self.ask(question)
            except ApiError:
                is_replaced = is_replaced or self.dispatcher.session.recovering is not None
                if self.trouble is not None or not is_replaced:
                    raise
            await asyncio.sleep(LOOK_S)

    async def watch(self) -> None:
        """Until cancelled: wake silent streams to send a comment, and refresh `num_waiting`."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            for call in list(self.running.values()):
                if now_s - call.reading.sent_s >= PING_S:
                    call.wake()
            await self.look_at_queue()

    async def look_at_queue(self) -> None:
        """Refresh `num_waiting`: the smaller of two successive counts, as sequences that wait only for the next step do
        not count."""
        before, self._num_waiting_last = self._num_waiting_last, await self.count_waiting()
        self.num_waiting = min(before, self._num_waiting_last)

    async def count_waiting(self) -> int:
        """The engine's count of waiting sequences, queried only if more run than may be queued: they may be waiting for
        KV cache."""
        if self.trouble is not None or self.dispatcher.num_sequences <= self._limits.max_queued:
            return 0
        try:
            return (await self.stats()).num_waiting
        except ApiError:
            return 0


def _rest_of(stats: Stats) -> str:
    """The reason why a healthy engine computes nothing (asleep or paused); "" if it does compute."""
    if stats.sleep_level is not None:
        return f"the engine sleeps (level {stats.sleep_level}), until /wake_up"
    return "the engine is paused, until /resume" if stats.is_paused else ""
