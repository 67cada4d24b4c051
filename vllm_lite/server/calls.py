"""Calls: all that run on this server. Who may start one, who is told that it is over, and what is done about clients
that do not read."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_lite import log
from vllm_lite.errors import EngineError, VllmLiteError
from vllm_lite.protocol.api import Stats
from vllm_lite.server.answer import PING_S
from vllm_lite.server.call import Call
from vllm_lite.server.errors import ApiError, refused, told
from vllm_lite.server.relay import Relay

LOOK_S = 0.25
PROBE_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1

logger = log.get(__name__)


class Calls:
    """Every method is called on the loop."""

    def __init__(self, relay: Relay, *, capacity: int, max_queued: int, write_timeout_s: float) -> None:
        """`capacity` sequences are in a batch, and `max_queued` may wait for a place in it."""
        self.relay = relay
        self.is_draining = False
        self._capacity = capacity
        self._max_queued = max_queued
        self._write_timeout_s = write_timeout_s
        self._num_waiting = 0
        self._running: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def death(self) -> str | None:
        """Why the engine ended, None as long as it lives."""
        dead = self.relay.session.dead
        return None if dead is None else told(dead)

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served, None as long as it can."""
        if self.death is not None:
            return self.death
        return "the server is shutting down" if self.is_draining else None

    def check(self) -> None:
        """Raises ApiError if no call may start now."""
        if self.trouble is not None:
            raise ApiError(503, self.trouble)
        limit = self._max_queued
        if self.relay.num_sequences >= self._capacity + limit or self._num_waiting >= max(1, limit):
            raise ApiError(
                429,
                f"as many requests as may wait are waiting (--max-num-queued-reqs {limit}); try again later",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Start `call`; afterwards nothing of it is left. Raises ApiError if it cannot be started."""
        self.check()
        if call.id in self._running:
            raise ApiError(409, f"request id {call.id!r} is in use; choose another", "request_id")
        self._running[call.id] = call
        try:
            try:
                self.relay.start(call)
            except VllmLiteError as error:
                raise refused(error) from error
            yield
        finally:
            del self._running[call.id]
            self.relay.drop(call)

    def get(self, call_id: str) -> Call:
        """A call that runs. Raises ApiError if there is none."""
        if call_id not in self._running:
            raise ApiError(404, f"no request {call_id!r} is running")
        return self._running[call_id]

    def abort_all(self) -> None:
        for call in self._running.values():
            self.relay.abort(call)

    async def probe(self) -> Stats:
        """The engine's counters, from its loop: it would serve. Raises ApiError if it does not answer."""
        if self.trouble is not None:
            raise ApiError(503, self.trouble)
        return await self.stats()

    async def stats(self) -> Stats:
        """The engine's counters, also when the server shuts down. Raises ApiError if it does not answer."""
        try:
            future = asyncio.wrap_future(self.relay.session.request_stats())
            return await asyncio.wait_for(future, PROBE_TIMEOUT_S)
        except (TimeoutError, EngineError) as error:
            text = told(error) if isinstance(error, EngineError) else f"no answer within {PROBE_TIMEOUT_S:g} s"
            raise ApiError(503, text) from error

    async def watch(self) -> None:
        """For ever: comments where streams are silent, an end to clients that do not read, a look at the queue."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            for call in list(self._running.values()):
                quiet_s = now_s - call.quiet_since_s
                if call.is_blocked and quiet_s > self._write_timeout_s:
                    logger.warning("the client of %s has not read for %.0f s; it is cut off", call.id, quiet_s)
                    call.cut()
                elif quiet_s >= PING_S:
                    call.wake()
            self._num_waiting = await self._count_waiting()

    async def _count_waiting(self) -> int:
        """The engine's own count, asked for when it may matter: its KV cache may be what requests wait for."""
        if self.trouble is not None or self.relay.num_sequences <= self._max_queued:
            return 0
        try:
            return (await self.probe()).num_waiting
        except ApiError:
            return 0
