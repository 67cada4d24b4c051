"""Watchers of a router receive its models and their engines; no model is loaded, woken or kept in memory for them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.unit.test_router_fleet import Rig, fleet_of, quick
from vllm_lite.server.router import watch
from vllm_lite.server.router.upstream import UpstreamLost
from vllm_lite.server.router.watch import Watcher, events_of
from vllm_lite.tools.top.watched import ServerLook

__all__ = ["quick"]  # a fixture that is used by itself
KEYS = [(b"authorization", b"Bearer mine")]


class Answer:
    """The answer of a model's /v1/live: events that a test puts into `said`; None ends it."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_closed = False

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self.said.get()) is not None:
            yield piece

    async def whole(self) -> bytes:
        return b'{"error": {"message": "this needs an admin key"}}'

    def close(self) -> None:
        self.is_closed = True


class Watched:
    """A watcher of a rig's fleet, its events, and the models' answers to it."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, only: str | None = None) -> None:
        monkeypatch.setattr(watch, "INTERVAL_S", 0.005)
        self.rig = rig
        self.answers: list[Answer] = []
        self.asked: list[tuple[Any, ...]] = []
        self.status = 200
        self.look = ServerLook()
        self.watcher = Watcher(rig.fleet, KEYS, only)
        self._events = self.watcher.events()

    def listen(self) -> None:
        """Have the processes of the rig answer."""
        for backend in self.rig.made:
            backend.open = self._open  # type: ignore[attr-defined]

    async def _open(self, *asked: Any) -> Answer:
        self.asked.append(asked)
        if self.status == 0:
            raise UpstreamLost("it does not listen")
        self.answers.append(Answer(self.status))
        return self.answers[-1]

    async def next(self) -> dict[str, Any]:
        text = (await asyncio.wait_for(anext(self._events), scaled(10))).decode()
        kind, data = text.removeprefix("event: ").rstrip().split("\ndata: ")
        found: dict[str, Any] = json.loads(data)
        self.look.take(kind, found)
        return found

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(scaled(10)):
            while not condition():
                await self.next()

    async def close(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]
        self.watcher.close()


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch, only: str | None = None, **settings: Any) -> AsyncIterator[Watched]:
    """A watcher of a fleet whose model a is loaded, or of the model `only`."""
    async with fleet_of(**settings) as rig:
        await rig.use("a")
        seen = Watched(rig, monkeypatch, only)
        seen.listen()
        yield seen
        await seen.close()


def engine_event(kind: str = "snapshot", **requests: Any) -> bytes:
    counts = {"generated_tokens": 5}
    engine = {"counts": counts, "requests": requests, "blocks": None, "times": {}}
    return f"event: {kind}\ndata: {json.dumps({'time': 7.0, 'engines': {'0': engine}})}\n\n".encode()


async def test_watching_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_of() as rig:
        seen = Watched(rig, monkeypatch)
        for _ in range(20):
            await seen.next()
        assert {name: model["state"] for name, model in seen.look.models.items()} == {"a": "unloaded", "b": "unloaded"}
        assert (rig.log, seen.look.models["a"]["used"], seen.look.memory_limit_bytes) == ([], None, 3 << 30)
        await seen.close()


async def test_engines_are_named_after_their_models_and_go_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as seen:
        await seen.until(lambda: seen.answers)
        assert seen.asked[0] == ("GET", b"/v1/live", KEYS, b"")
        await seen.answers[0].said.put(engine_event(r={"id": "r"})[:30])
        await seen.answers[0].said.put(engine_event(r={"id": "r"})[30:])
        await seen.until(lambda: "a/0" in seen.look.engines)
        assert seen.look.engines["a/0"].requests == {"r": {"id": "r"}}
        assert seen.look.models["a"]["state"] == "loaded"
        assert seen.look.models["a"]["active"] == 0, "a watcher is not a request"
        await seen.answers[0].said.put(None)
        await seen.until(lambda: "a/0" not in seen.look.engines)
        assert seen.look.models["a"]["state"] == "loaded", "its stream alone has ended, and is opened again"
        await seen.until(lambda: len(seen.answers) > 1)
        await seen.answers[1].said.put(engine_event())
        await seen.until(lambda: "a/0" in seen.look.engines)
        await seen.rig.use("b")  # a has to go for it
        seen.listen()
        assert seen.rig.log[-2:] in (["stop a", "load b"], ["sleep a 1", "load b"])
        await seen.answers[1].said.put(None)
        await seen.until(lambda: "a/0" not in seen.look.engines)
        assert seen.answers[0].is_closed
        assert seen.look.models["a"]["counts"]["loads"] == 1


async def test_a_model_that_is_not_used_is_unloaded_though_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, models_idle_s=0.3) as seen:
        await seen.until(lambda: seen.answers)
        await seen.answers[0].said.put(engine_event())
        await seen.until(lambda: "a/0" in seen.look.engines)
        await seen.until(lambda: seen.look.models["a"]["state"] == "unloaded")
        assert seen.look.engines == {}
        assert seen.rig.log == ["load a", "stop a"]


async def test_a_model_with_its_own_keys_is_shown_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as seen:
        seen.status = 403
        await seen.until(lambda: seen.look.models.get("a", {}).get("hidden"))
        assert seen.look.models["a"]["hidden"] == "this needs an admin key"
        for _ in range(10):
            await seen.next()
        assert len(seen.asked) == 1, "it would say so again"
        assert seen.look.has_speeds


async def test_a_models_refusal_is_shown_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as seen:
        seen.status = 429
        await seen.until(lambda: seen.look.models.get("a", {}).get("hidden"))
        await seen.until(lambda: len(seen.asked) > 2)
        assert seen.look.models["a"]["hidden"], "it is asked again, and says so again"
        seen.status = 200
        await seen.until(lambda: seen.answers[-1].status == 200)
        await seen.until(lambda: seen.look.models["a"]["hidden"] is None)


async def test_a_stream_is_begun_again_behind_a_sleep_and_a_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers forget the engines of a model that is no more loaded or sleeping."""
    async with watched(monkeypatch) as seen:
        await seen.until(lambda: seen.answers)
        await seen.answers[0].said.put(engine_event(r={"id": "r"}))
        await seen.until(lambda: "a/0" in seen.look.engines)
        status: Any = seen.rig.fleet.members["a"].status
        for op, state in (("sleep", "sleeping"), ("load", "loaded")):
            before = seen.answers[-1]
            for _ in range(3):  # one is in the queue, others behind it
                before.said.put_nowait(engine_event("update", r={"tokens": 2}))
            await seen.rig.until(lambda before=before: before.said.qsize() < 2)  # type: ignore[misc]
            status.op = op
            await seen.until(lambda: seen.look.models["a"]["state"] in ("loading", "unloading"))
            assert seen.look.engines == {}
            for _ in range(5):
                await seen.next()
                assert seen.look.engines == {}, "what was said before is of no use"
            assert before.is_closed
            assert seen.answers[-1] is before, "nothing is read that nobody keeps"
            status.state, status.op = state, None
            await seen.until(lambda before=before: seen.answers[-1] is not before)
            seen.answers[-1].said.put_nowait(engine_event(r={"id": "r"}))
            await seen.until(lambda: "a/0" in seen.look.engines)
            assert seen.look.engines["a/0"].requests == {"r": {"id": "r"}}


async def test_a_model_that_does_not_listen_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as seen:
        seen.status = 0
        await seen.until(lambda: len(seen.asked) > 2)
        seen.status = 200
        await seen.until(lambda: seen.answers)
        await seen.close()
        await seen.rig.until(lambda: seen.answers[0].is_closed)


async def test_one_model_alone_and_one_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, only="b") as seen:
        await seen.next()
        for _ in range(5):
            await seen.next()
        assert seen.asked == []
        await seen.rig.fleet.remove(seen.rig.fleet.find("b"))
        await seen.until(lambda: "b" not in seen.look.models)
        assert list(seen.look.models) == ["a"]
        seen.rig.fleet.is_draining = True
        while (event := await anext(seen._events, None)) is not None:
            assert event


async def test_a_slow_reader_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as seen:
        await seen.until(lambda: seen.answers)
        said = seen.answers[0].said
        for _ in range(9):
            said.put_nowait(engine_event("update"))
        await seen.rig.until(lambda: said.qsize() < 8)  # one is in the queue, and the next one waits for a place in it
        assert said.qsize() >= 6, "what is not read stays with the model, whose feed leaves it out"


async def test_an_event_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_EVENT_BYTES", 100)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"event: update\ndata: {}\n\n: ping\n\n"
        for _ in range(20):
            yield b"data: 01234567"

    found = events_of(pieces())
    assert await anext(found) == ("update", b"{}")
    with pytest.raises(UpstreamLost, match="too long"):
        await anext(found)
