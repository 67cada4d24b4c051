"""Fleet: the models at run time. A request leases its model, which is loaded for it. Decisions of placement.py are
carried out, one operation at a time per model, for several models in parallel.

A model whose processes die is loaded again for the next request; after repeated deaths the delay doubles, and its
requests are refused meanwhile. Other models are not affected.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from math import ceil
from typing import Any, NamedTuple

from vllm_lite.errors import VllmLiteError
from vllm_lite.runtime import log
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router.catalog import Catalog, Entry
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.server.router.known import estimate
from vllm_lite.server.router.member import FleetModel, MakeBackend
from vllm_lite.server.router.memory import tree_bytes
from vllm_lite.server.router.placement import Action, Decision, ModelStatus, PlacementRules, decide

LOOK_S = 0.1
"""Seconds between two decisions if no event triggers one earlier."""
MEASURE_S = 2.0
MAX_BACKOFF_S = 60.0
SOUND_S = 60.0
"""Seconds of running after which earlier deaths of a model no longer count."""
FREE_DEATHS = 3
"""Number of deaths in a row after which a model's reload is delayed."""
SLICE_S, SLICE_LOADS = 10.0, 4.0
"""Default time slice in seconds, and its minimum in multiples of the model's loading time: swaps then take a fifth of
the time at most."""
RETRY_AFTER_S = 5
EWMA = 0.5
SETTLE_S, WRITES_S = 0.05, 70.0
"""Seconds between two checks for an operation's end, and the timeout for writing KV to disk before a model stops; the
engine gives its workers 60 s."""

logger = log.get(__name__)


class Lease(NamedTuple):
    """A request's use of a loaded model, which is not unloaded meanwhile, but may be put to sleep."""

    member: FleetModel
    backend: Any


class Fleet:
    """All models of the router. Every method is called on the loop."""

    def __init__(
        self,
        catalog: Catalog,
        config: RouterConfig,
        make: MakeBackend,
        *,
        measure: Callable[[Sequence[int]], dict[int, int]] = tree_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalog = catalog
        self.config = config
        self.members: dict[str, FleetModel] = {}
        self.is_draining = False
        self._make = make
        self._measure_trees = measure
        self._clock = clock
        self._rules = PlacementRules(config.memory_bytes, config.models_max)
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ops: set[asyncio.Task[None]] = set()
        self._closing: frozenset[str] = frozenset()
        for entry in catalog.entries.values():
            self.add(entry)

    # ---- models

    def add(self, entry: Entry) -> FleetModel:
        """Add a model of the catalog, without loading it."""
        slice_s = self.config.models_slice_s or SLICE_S
        status = ModelStatus(entry.name, pin=entry.pin, slice_s=slice_s)
        member = FleetModel(entry, status, trouble=entry.trouble, keep_alive_s=self._usual_s(entry))
        self.members[entry.name] = member
        return member

    def _usual_s(self, entry: Entry) -> float | None:
        """Default time for which a model stays loaded without requests."""
        return entry.idle_s if entry.idle_s is not None else self.config.models_idle_s

    def find(self, name: str | None) -> FleetModel:
        """Find a model by name; without a name, the only model. Raises ApiError."""
        if name is None or name == "":
            if len(self.members) == 1:
                return next(iter(self.members.values()))
            raise ApiError(400, f"model must be given: one of {self._shown()}", "model")
        entry = self.catalog.find(name)
        if entry is None or entry.name not in self.members:
            raise ApiError(404, f"the model {name[:200]!r} does not exist; this server has {self._shown()}", "model")
        return self.members[entry.name]

    async def remove(self, member: FleetModel) -> None:
        """Remove a model, after stopping its processes."""
        self.members.pop(member.entry.name, None)
        self.catalog.entries.pop(member.entry.name, None)
        member.refuse(_deleted(member))
        await self._settled(member)
        if member.backend is not None:
            await member.backend.stop()
            member.backend = None

    def _shown(self) -> str:
        return ", ".join(list(self.members)[:20]) or "none yet"

    # ---- requests

    @asynccontextmanager
    async def lease(self, member: FleetModel, wait_s: float | None = None) -> AsyncIterator[Lease]:
        """Wait until the model is loaded, and lease it. Raises ApiError (503) if it cannot be loaded, or not in
        time."""
        until_s = self._clock() + (self.config.models_wait_s if wait_s is None else wait_s)
        while True:
            await self._loaded(member, until_s)
            if member.backend is not None:  # else it has just ended
                break
        status = member.status
        status.num_active += 1
        try:
            yield Lease(member, member.backend)
        finally:
            status.num_active -= 1
            status.used_at_s = self._clock()
            self._set_leaving(member)
            self._changed.set()

    async def _loaded(self, member: FleetModel, until_s: float) -> None:
        """Wait until the model is loaded. Raises ApiError."""
        self._check(member)
        if self._admits(member):
            return
        status, began_s = member.status, self._clock()
        await self._estimated(member, until_s)
        self._check(member)
        if not status.is_wanted:
            status.wanted_since_s = self._clock()
        waiter: asyncio.Future[None] = self._loop.create_future()
        member.waiters.append(waiter)
        status.num_waiting += 1
        self._changed.set()
        try:
            async with asyncio.timeout(max(0.0, until_s - self._clock())):
                await waiter
        except TimeoutError as error:
            member.counts.refusals += 1
            waited_s = self._clock() - began_s
            text = f"the model {member.entry.name!r} was not loaded within {waited_s:.0f} s (--models-wait-s)"
            raise _unavailable(f"{text}: {self._why_not(member)}", member.load_s) from error
        finally:
            status.num_waiting -= 1
            if waiter in member.waiters:
                member.waiters.remove(waiter)
            self._changed.set()

    async def _estimated(self, member: FleetModel, until_s: float) -> None:
        """Wait, until `until_s` at most, for the memory estimate, which a thread makes from the model's files."""
        if member.estimate is None:
            member.estimate = asyncio.ensure_future(asyncio.to_thread(estimate, member.entry.config))
        done, _ = await asyncio.wait([member.estimate], timeout=max(0.0, until_s - self._clock()))
        found = member.estimate.result() if done else 0
        member.status.expected_bytes = max(member.status.least_bytes, member.status.expected_bytes) or found

    def _check(self, member: FleetModel) -> None:
        """Raise ApiError for a model that cannot be loaded now."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down")
        if self.members.get(member.entry.name) is not member:
            raise _deleted(member)
        if member.trouble is None:
            return
        if member.retry_at_s is None:
            member.counts.refusals += 1
            raise ApiError(503, f"the model {member.entry.name!r} cannot be served: {member.trouble}")
        left_s = member.retry_at_s - self._clock()
        if left_s > 0:
            member.counts.refusals += 1
            raise _unavailable(f"the model {member.entry.name!r} cannot be loaded: {member.trouble}", left_s)
        member.trouble = member.retry_at_s = None

    def _admits(self, member: FleetModel) -> bool:
        status = member.status
        return status.state == "loaded" and status.op is None and member.entry.name not in self._closing

    def _why_not(self, member: FleetModel) -> str:
        others = [each for each in self.members.values() if each is not member and each.status.has_weights]
        busy = ", ".join(f"{each.entry.name} ({each.status.num_active} requests)" for each in others)
        return f"it is {member.state}" + (f", and memory is taken by {busy}" if busy else "")

    def idle_s(self, member: FleetModel) -> float | None:
        """Seconds since the model's last request ended, 0 while it has some; None if it was never loaded."""
        status = member.status
        if not status.used_at_s:
            return None
        return 0.0 if status.num_active else self._clock() - status.used_at_s

    # ---- requests of admins

    def wish(self, member: FleetModel) -> asyncio.Task[None]:
        """Load a model before any request needs it."""

        async def load() -> None:
            async with self.lease(member):
                pass

        task = asyncio.ensure_future(load())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # shown as the model's `trouble`
        return task

    def let_go(self, member: FleetModel) -> None:
        """Unload a model as soon as it has no requests."""
        member.is_let_go = True
        self._set_leaving(member)
        self._changed.set()

    def keep(self, member: FleetModel, keep_s: float | None) -> None:
        """Set the time for which a model stays loaded without requests; None: until its memory is needed."""
        member.keep_alive_s, member.is_let_go = keep_s, False
        self._set_leaving(member)
        self._changed.set()

    def _set_leaving(self, member: FleetModel) -> None:
        kept = 0.0 if member.is_let_go else None if member.entry.pin else member.keep_alive_s
        member.status.leaves_at_s = None if kept is None else self._clock() + kept

    # ---- decisions

    async def run(self) -> None:
        """Until cancelled: make decisions, carry them out, and measure memory."""
        await asyncio.gather(self._deciding(), self._measuring())

    async def _measuring(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            await self.measure()
            self._changed.set()

    async def _deciding(self) -> None:
        for member in self.members.values():
            if member.entry.pin and member.trouble is None:
                self.wish(member)
        while True:
            self._changed.clear()
            self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    def look(self) -> None:
        """Detect deaths, decide, and start the chosen actions."""
        now_s = self._clock()
        for member in self.members.values():
            self._notice_end(member)
        decision: Decision = decide([member.status for member in self.members.values()], self._rules, now_s)
        self._closing = decision.closing
        for action in decision.actions:
            self._begin(self.members[action.name], action)
        for member in self.members.values():
            if self._admits(member):
                member.wake_waiters()

    def _begin(self, member: FleetModel, action: Action) -> None:
        if action.do == "refuse":
            if not member.waiters:
                return
            text = f"the model {member.entry.name!r} cannot be loaded: {action.why}"
            member.refuse(ApiError(503, text))
            member.counts.refusals += 1
            return
        if action.do == "load" and (member.trouble is not None or self.is_draining):
            self._refuse_for_trouble(member)
            return
        work = {"load": self._load, "sleep": self._sleep, "stop": self._stop}[action.do]
        member.status.op = action.do
        task = asyncio.ensure_future(self._carry_out(member, action, work(member, action)))
        self._ops.add(task)
        task.add_done_callback(self._ops.discard)

    async def _carry_out(self, member: FleetModel, action: Action, work: Coroutine[Any, Any, None]) -> None:
        began_s = self._clock()
        try:
            await work
            took = f"{self._clock() - began_s:.2f} s"
            logger.info(
                "%s: %s%s done after %s", member.entry.name, action.do, f" ({action.why})" if action.why else "", took
            )
        except (VllmLiteError, OSError) as error:
            await self._failed(member, action, str(error))
        finally:
            if action.do != "load":
                await self.measure()  # the next decision needs the freed memory
            member.status.op = None
            self._changed.set()

    async def _load(self, member: FleetModel, _: Action) -> None:
        status, began_s = member.status, self._clock()
        if status.state == "sleeping":
            await member.backend.wake()
            member.counts.wakes += 1
        else:
            member.backend = self._make(member.entry, self._on_end)
            await member.backend.start()
            member.counts.loads += 1
        took_s = self._clock() - began_s
        member.load_s = took_s if not member.load_s else member.load_s + EWMA * (took_s - member.load_s)
        member.counts.load_s += took_s
        status.slice_s = self.config.models_slice_s or max(SLICE_S, SLICE_LOADS * member.load_s)
        status.state, status.level, status.loaded_at_s = "loaded", 0, self._clock()
        status.held_bytes = max(status.held_bytes, status.expected_bytes)  # until the first measurement
        status.used_at_s, member.is_let_go = status.loaded_at_s, False
        self._set_leaving(member)

    async def _sleep(self, member: FleetModel, action: Action) -> None:
        await member.backend.sleep(action.level)
        member.counts.sleeps += 1
        member.status.state, member.status.level = "sleeping", action.level
        member.status.wanted_since_s = self._clock()

    async def _stop(self, member: FleetModel, _: Action) -> None:
        backend, config = member.backend, member.entry.config
        member.counts.stops += 1
        member.keep_alive_s = self._usual_s(member.entry)  # a request's keep_alive ends with it
        if member.status.state == "loaded" and config is not None and config.kv_cache_dir is not None:
            try:  # sleeping ends its workers, once they have written their KV
                await asyncio.wait_for(backend.sleep(2), WRITES_S)
            except (VllmLiteError, TimeoutError) as error:
                logger.warning("%s: chats may not be on disk: %s", member.entry.name, str(error) or f"{WRITES_S:g} s")
        await backend.stop()
        member.backend = None
        member.status.state, member.status.leaves_at_s = "unloaded", None

    async def _failed(self, member: FleetModel, action: Action, reason: str) -> None:
        """Handle a failed operation: end processes in an unknown state, unless they hold requests. Streams of a model
        that does not wake must not end as if complete, which a stopped server would let them do."""
        logger.warning("%s: %s failed: %s", member.entry.name, action.do, reason)
        backend = member.backend
        if backend is not None and (action.do == "load" or backend.ended() is not None):
            await (backend.kill() if member.status.num_active else backend.stop())
            member.backend = None
            member.status.state = "unloaded"
        if action.do != "load":
            await asyncio.sleep(LOOK_S)  # before the next decision
            return
        member.counts.failures += 1
        member.failures_in_a_row += 1
        self._back_off(member, reason)

    def _back_off(self, member: FleetModel, reason: str) -> None:
        """Refuse a model's requests for a time that doubles with each failure."""
        member.trouble = reason
        member.retry_at_s = self._clock() + min(MAX_BACKOFF_S, 2.0 ** min(16, member.failures_in_a_row - 1))
        self._refuse_for_trouble(member)

    def _notice_end(self, member: FleetModel) -> None:
        """Detect that a model's processes have ended by themselves, and schedule the clean-up."""
        status = member.status
        if member.backend is None or status.op is not None or (reason := member.backend.ended()) is None:
            return
        logger.warning("the processes of %s have ended: %s", member.entry.name, reason)
        member.counts.deaths += 1
        is_sound = self._clock() - status.loaded_at_s > SOUND_S
        member.failures_in_a_row = 1 if is_sound else member.failures_in_a_row + 1
        if member.failures_in_a_row > FREE_DEATHS:
            self._back_off(member, reason)
        status.op = "stop"
        task = asyncio.ensure_future(self._clean_up(member))
        self._ops.add(task)
        task.add_done_callback(self._ops.discard)

    async def _clean_up(self, member: FleetModel) -> None:
        try:
            await member.backend.stop()
        finally:
            member.backend = None
            member.status.state, member.status.held_bytes, member.status.op = "unloaded", 0, None
            self._changed.set()

    def _on_end(self) -> None:
        """Trigger a decision. Called on any thread."""
        self._loop.call_soon_threadsafe(self._changed.set)

    def _refuse_for_trouble(self, member: FleetModel) -> None:
        left_s = 0.0 if member.retry_at_s is None else member.retry_at_s - self._clock()
        text = f"the model {member.entry.name!r} cannot be loaded: {member.trouble or 'the server is shutting down'}"
        member.refuse(_unavailable(text, left_s))

    async def measure(self) -> None:
        """Measure the memory of all models' processes, in a thread."""
        members = [member for member in self.members.values() if member.backend is not None and member.backend.pid]
        found = await asyncio.to_thread(self._measure_trees, [member.backend.pid for member in members])
        for member in self.members.values():
            status = member.status
            status.held_bytes = 0 if member.backend is None else found.get(member.backend.pid, status.held_bytes)
            if status.state == "sleeping" and status.level == 1 and status.op is None:
                status.asleep_bytes = max(status.asleep_bytes, status.held_bytes)
            if status.state != "loaded" or member.backend is None or not status.held_bytes:
                continue
            if not status.least_bytes:
                status.least_bytes = status.expected_bytes = status.held_bytes
            status.expected_bytes = max(status.expected_bytes, status.held_bytes)

    # ---- the end

    async def close(self, grace_s: float) -> None:
        """Refuse waiting requests, give running ones `grace_s` to end, and stop all processes."""
        self.is_draining = True
        for member in self.members.values():
            member.refuse(ApiError(503, "the server is shutting down"))
        backends = [member.backend for member in self.members.values() if member.backend is not None]
        await asyncio.gather(*(backend.stop(grace_s) for backend in backends), return_exceptions=True)
        await asyncio.gather(*self._ops, return_exceptions=True)

    async def _settled(self, member: FleetModel) -> None:
        """Wait until no operation on the model is in progress."""
        while member.status.op is not None:  # noqa: ASYNC110 - an operation sets no event of its own
            await asyncio.sleep(SETTLE_S)


def _deleted(member: FleetModel) -> ApiError:
    return ApiError(404, f"the model {member.entry.name!r} was deleted", "model")


def _unavailable(text: str, left_s: float) -> ApiError:
    return ApiError(503, text, headers={"Retry-After": str(max(1, ceil(left_s)) if left_s > 0 else RETRY_AFTER_S)})
