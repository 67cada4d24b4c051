"""GET /v1/live of the router: the state of all models, and of the engines of those with processes.

Watching loads or wakes no model, and keeps none from being unloaded: it takes no lease. A model's own /v1/live is read
with the watcher's keys, at the watcher's speed.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_lite.server.calls.registry import PROBE_TIMEOUT_S
from vllm_lite.server.http.application import gets
from vllm_lite.server.http.auth import KEY_HEADERS, require_watcher
from vllm_lite.server.live.feed import INTERVAL_S, MAX_WATCHERS, event
from vllm_lite.server.live.routes import OF_BLOCK, OF_SETTINGS, PATH
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.forward import target_of
from vllm_lite.server.router.member import FleetModel
from vllm_lite.server.router.upstream import Header, UpstreamLost

COUNTS = ("loads", "wakes", "sleeps", "stops", "deaths", "failures", "refusals")
SHOWN = ("loaded", "sleeping")
"""States in which watchers keep a model's engines; they forget them in other states."""
MAX_EVENT_BYTES = 16 << 20
"""Upper bound on an event, larger than any real one."""
Row = dict[str, Any]


class LiveData(msgspec.Struct):
    """Data of a model's event; its engines are forwarded undecoded."""

    time: float
    engines: dict[str, msgspec.Raw]


_data = msgspec.json.Decoder(LiveData)


class RouterLive:
    """Answers watchers with streams of events, and forwards other live routes to the model."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._num_watchers = 0

    def routes(self) -> list[Route]:
        return gets({PATH: self.live, OF_BLOCK: self.of_model, OF_SETTINGS: self.of_model})

    async def live(self, request: Request) -> Response:
        require_watcher(request)
        if self._fleet.is_draining:
            raise ApiError(503, "the server is shutting down")
        if self._num_watchers >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} clients watch this server already; close one of them first")
        name = request.query_params.get("model")
        only = None if name is None else self._fleet.find(name).entry.name
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._watch(_keys_of(request), only), media_type="text/event-stream", headers=headers)

    async def of_model(self, request: Request) -> Response:
        """Forward a live route to the model's processes, if it has some, with the watcher's keys."""
        require_watcher(request)
        member = self._fleet.find(request.query_params.get("model"))
        name, backend = member.entry.name, member.backend
        if backend is None or member.state not in SHOWN:
            raise ApiError(404, f"the model {name!r} is {member.state}, so it has no engines to look at")
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answer = await backend.open("GET", target_of(request.scope), _keys_of(request), b"")
                try:
                    body = await answer.whole()
                finally:
                    answer.close()
        except (TimeoutError, UpstreamLost) as error:
            why = error if isinstance(error, UpstreamLost) else f"not within {PROBE_TIMEOUT_S:g} s"
            raise ApiError(503, f"the processes of the model {name!r} do not answer: {why}") from error
        return Response(body, answer.status, media_type="application/json")

    async def _watch(self, keys: list[Header], only: str | None) -> AsyncIterator[bytes]:
        self._num_watchers += 1
        watcher = Watcher(self._fleet, keys, only)
        try:
            async for event in watcher.events():
                yield event
        finally:
            self._num_watchers -= 1
            watcher.close()


class Watcher:
    """One watcher: the model rows it was sent, and the engine streams that are read for it."""

    def __init__(self, fleet: Fleet, keys: list[Header], only: str | None = None) -> None:
        """`only`: the model whose engines are shown, None for all; all models are always listed."""
        self._fleet = fleet
        self._keys = keys
        self._only = only
        self._rows: dict[str, Row] | None = None
        self._sources: dict[str, EngineSource] = {}
        self._events: asyncio.Queue[tuple[EngineSource, bytes]] = asyncio.Queue(maxsize=1)
        """At most one event: a slow watcher blocks the reading, so that the model's own feed skips what it misses."""

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the server ends."""
        while not self._fleet.is_draining:
            self._follow()
            yield self._models()
            until_s = time.monotonic() + INTERVAL_S
            while (left_s := until_s - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        source, found = await self._events.get()
                except TimeoutError:
                    break
                if not source.is_cancelled:
                    yield found

    def close(self) -> None:
        for source in self._sources.values():
            source.cancel()

    def _follow(self) -> None:
        """Start and stop engine streams by the states of the models. A stream is not continued through another state:
        watchers forget the engines meanwhile, and need the snapshot at the start of a new stream."""
        refusals: dict[str, str | None] = {}
        for name, source in list(self._sources.items()):
            member = self._fleet.members.get(name)
            is_shown = member is not None and member.backend is source.backend and member.state in SHOWN
            if is_shown and not (source.is_over and not source.is_refused):
                continue
            source.cancel()
            del self._sources[name]
            if is_shown:
                refusals[name] = source.refusal
        for name, member in self._fleet.members.items():
            is_wanted = self._only in (None, name) and name not in self._sources
            if is_wanted and member.backend is not None and member.state in SHOWN:
                self._sources[name] = EngineSource(member, self._keys, self._events, refusals.get(name))

    def _models(self) -> bytes:
        """The event about the models: first all of them, then their changes."""
        now_s = time.time()
        rows = {name: self._row(member, now_s) for name, member in self._fleet.members.items()}
        before, self._rows = self._rows, rows
        if before is None:
            changes: dict[str, Row | None] = dict(rows)
        else:
            changes = dict.fromkeys(before.keys() - rows.keys())
            for name, row in rows.items():
                known = before.get(name, {})
                if changed := {field: value for field, value in row.items() if known.get(field, known) != value}:
                    changes[name] = changed
        limit = self._fleet.config.memory_bytes
        return event("snapshot" if before is None else "update", now_s, models=changes, memory_limit_bytes=limit)

    def _row(self, member: FleetModel, now_s: float) -> Row:
        source = self._sources.get(member.entry.name)
        return row_of(member, self._fleet.idle_s(member), now_s) | {
            "hidden": None if source is None else source.refusal
        }


class EngineSource:
    """The stream of one model's engines, read by a task until it ends."""

    def __init__(
        self,
        member: FleetModel,
        keys: list[Header],
        events: "asyncio.Queue[tuple[EngineSource, bytes]]",
        refusal: str | None = None,
    ) -> None:
        self.backend = member.backend
        self.refusal = refusal
        """The reason why the model does not show its engines to this watcher."""
        self.is_refused = False
        """Whether the refusal is permanent, so that the stream is not retried."""
        self._name = member.entry.name
        self._keys = keys
        self._events = events
        self._task = asyncio.ensure_future(self._read())
        self.is_cancelled = False
        """Whether the task was cancelled: its events in the queue must be ignored."""

    def cancel(self) -> None:
        """End the stream, unless it has ended by itself."""
        self.is_cancelled = self._task.cancel()

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def _read(self) -> None:
        is_seen = False
        try:
            answer = await self.backend.open("GET", PATH.encode(), self._keys, b"")
            try:
                if answer.status != 200:
                    self.refusal, self.is_refused = _message(await answer.whole()), answer.status in (401, 403)
                    return
                self.refusal = None
                async for found in events_of(answer.pieces()):
                    await self._events.put((self, self._renamed(*found)))
                    is_seen = True
            finally:
                answer.close()
        except UpstreamLost:
            pass  # the model has ended, or does not listen yet
        if is_seen:
            await self._events.put((self, event("snapshot", time.time(), model=self._name, engines={})))

    def _renamed(self, kind: str, data: bytes) -> bytes:
        """Re-encode an event with the model's name as prefix of its engines' names."""
        try:
            found = _data.decode(data)
        except msgspec.MsgspecError as error:
            raise UpstreamLost(f"it is not an event: {error}") from error
        engines = {f"{self._name}/{number}": engine for number, engine in found.engines.items()}
        return event(kind, found.time, model=self._name, engines=engines)


async def events_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield kind and data of the events in a stream of /v1/live. Raises UpstreamLost for an endless event."""
    held = b""
    async for piece in pieces:
        *whole, held = (held + piece).split(b"\n\n")
        if len(held) > MAX_EVENT_BYTES:
            raise UpstreamLost("an event is too long")
        for text in whole:
            fields = dict(line.split(b": ", 1) for line in text.split(b"\n") if b": " in line)
            if b"data" in fields:
                yield fields.get(b"event", b"update").decode(errors="replace"), fields[b"data"]


def row_of(member: FleetModel, idle_s: float | None, now_s: float) -> Row:
    """A model's row for watchers. Numbers are those of /metrics; `used` is the time at which its last request ended."""
    entry, status = member.entry, member.status
    return {
        "state": member.state,
        "aliases": list(entry.aliases),
        "pinned": entry.pin,
        "memory_bytes": status.held_bytes,
        "expected_bytes": status.expected_bytes,
        "active": status.num_active,
        "waiting": status.num_waiting,
        "load_s": round(member.load_s, 3),
        "used": None if idle_s is None else round(now_s - idle_s),
        "error": member.trouble,
        "counts": {name: getattr(member.counts, name) for name in COUNTS},
    }


def _keys_of(request: Request) -> list[Header]:
    return [header for header in request.scope["headers"] if header[0] in KEY_HEADERS]


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "it does not say what it does"
