"""Feed: polls the engines while there are watchers, and sends each watcher its updates.

All watchers share the polls, and none is waited for: only the latest snapshot and its change are kept. A watcher that
has seen the previous snapshot gets the change; a new or slow one gets the whole snapshot.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from vllm_lite.client.engines.any_session import Member
from vllm_lite.errors import EngineError
from vllm_lite.server.calls.registry import PROBE_TIMEOUT_S, Calls
from vllm_lite.server.live.snapshot import EngineSnapshot, Snapshot
from vllm_lite.server.openai.errors import ApiError

INTERVAL_S = 0.5
MAX_WATCHERS = 64


class Feed:
    """Snapshots of all engines of one server. Every method is called on the loop."""

    def __init__(self, calls: Calls, interval_s: float = INTERVAL_S) -> None:
        self._calls = calls
        self._interval_s = interval_s
        self._engines: dict[int, EngineSnapshot] = {}
        self._num_looks = 0
        self._num_watchers = 0
        self._change = b""
        self._looked = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the server ends: one `snapshot`, and an `update` for each later poll."""
        self._num_watchers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_again_and_again())
        seen = -1
        try:
            while self._calls.trouble is None and self._looking is not None:
                if seen == self._num_looks or not self._num_looks:
                    async with self._looked:
                        await self._looked.wait()
                    continue
                follows, seen = seen == self._num_looks - 1, self._num_looks
                yield self._change if follows else event("snapshot", time.time(), engines=self._whole())
        finally:
            self._num_watchers -= 1

    def check(self) -> None:
        """Raise ApiError if there are MAX_WATCHERS already, or the server cannot serve."""
        if self._calls.trouble is not None:
            raise ApiError(503, self._calls.trouble)
        if self._num_watchers >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} clients watch this server already; close one of them first")

    def _whole(self) -> dict[str, Snapshot]:
        return {str(number): engine.whole() for number, engine in self._engines.items()}

    async def _look_again_and_again(self) -> None:
        try:
            while self._num_watchers and self._calls.trouble is None:
                changes = await self._look()
                async with self._looked:
                    self._num_looks += 1
                    self._change = event("update", time.time(), engines=changes)
                    self._looked.notify_all()
                await asyncio.sleep(self._interval_s)
        finally:
            self._looking, self._num_looks, self._engines = None, 0, {}
            async with self._looked:
                self._looked.notify_all()

    async def _look(self) -> dict[str, Snapshot | None]:
        """Poll all engines, and return their changes; None for an engine that does not answer."""
        first = max((engine.next_block for engine in self._engines.values()), default=0)
        try:
            asked = self._calls.dispatcher.session.ask_each(first)
        except EngineError:
            asked = []
        answers = await asyncio.gather(*map(self._one, asked))
        changes = {str(number): change for number, change in answers}
        missing = self._engines.keys() - {number for number, change in answers if change is not None}
        for number in missing:
            del self._engines[number]
            changes[str(number)] = None
        return changes

    async def _one(self, member: Member) -> tuple[int, Snapshot | None]:
        answers = [asyncio.wrap_future(each) for each in (member.stats, member.view) if each is not None]
        try:
            stats, view = await asyncio.wait_for(asyncio.gather(*answers), PROBE_TIMEOUT_S)
        except (TimeoutError, EngineError):
            return member.number, None
        engine = self._engines.setdefault(member.number, EngineSnapshot(member.number))
        return member.number, engine.look(member.welcome, stats, view, time.time())


def event(kind: str, now_s: float, **data: object) -> bytes:
    """Encode one event of /v1/live."""
    encoded = msgspec.json.encode({"time": round(now_s, 3), **data})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encoded)
