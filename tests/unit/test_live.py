"""Watchers get changes that add up to everything, whether they read in time or not."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.deadlines import scaled
from tests.fakes import STATS, welcome
from vllm_lite.client.engines.any_session import Member
from vllm_lite.errors import EngineDeadError
from vllm_lite.protocol.view import EngineView, RequestRow
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.live import feed as feeds
from vllm_lite.server.live.feed import Feed
from vllm_lite.server.live.snapshot import EngineSnapshot, Snapshot
from vllm_lite.server.openai.errors import ApiError

WELCOME = welcome()


def row(name: str, output: int = 0, table: bytes = b"", age_s: float = 1.0) -> RequestRow:
    return RequestRow(name, f"{name}~0123", "running", None, None, 1, 5, 0, 5, output, 0, age_s, 1, 0, table)


def seen(rows: list[RequestRow], first: int = 0, blocks: bytes = b"\0\0\0\0", total: int = 4) -> EngineView:
    return EngineView(7, 3, 2, 1, len(rows), rows, total, 16, first, blocks)


def merged(state: Snapshot, change: Snapshot) -> Snapshot:
    """The state of a watcher after an update."""
    requests = {key: dict(fields) for key, fields in state.get("requests", {}).items()}
    for key, fields in change["requests"].items():
        if fields is None:
            del requests[key]
        else:
            requests.setdefault(key, {}).update(fields)
    blocks = bytearray(state.get("blocks", b""))
    if change["blocks"] is not None:
        new, first = b64decode(change["blocks"]["bytes"]), change["blocks"]["first"]
        blocks += bytes(max(0, first - len(blocks)))
        blocks[first : first + len(new)] = new
    return {**change, "requests": requests, "blocks": bytes(blocks)}


def whole(engine: EngineSnapshot) -> Snapshot:
    state = engine.whole()
    return {**state, "blocks": b64decode(state["blocks"]["bytes"])}


def test_a_row_has_its_id_without_its_owner_and_when_it_came() -> None:
    engine = EngineSnapshot(0)
    change = engine.look(WELCOME, STATS, seen([row("cmpl-1", table=b"\3\0\0\0\1\0\0\0")]), 100.0)
    assert (
        change["requests"]["cmpl-1"] | {"since": 99.0, "id": "cmpl-1", "table": [3, 1]} == change["requests"]["cmpl-1"]
    )
    later = engine.look(WELCOME, STATS, seen([row("cmpl-1", 1, b"\3\0\0\0\1\0\0\0", 1.4)]), 100.5)
    assert later["requests"] == {"cmpl-1": {"output": 1}}, "what has not changed is not sent again"
    assert later["blocks"] is None
    assert engine.look(WELCOME, STATS, seen([]), 101.0)["requests"] == {"cmpl-1": None}


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 3), st.sampled_from([b"", b"\1\0\0\0"]))),
            st.binary(min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_changes_add_up_to_everything(looks: list[tuple[dict[str, tuple[int, bytes]], bytes]]) -> None:
    engine, state = EngineSnapshot(0), dict[str, Any]()
    for number, (rows, blocks) in enumerate(looks):
        first = engine.next_block
        part = blocks if first + 3 <= 9 else blocks[: 9 - first]
        view = seen([row(name, *fields) for name, fields in rows.items()], first, part, 9)
        state = merged(state, engine.look(WELCOME, STATS, view, float(number)))
        assert state["requests"] == whole(engine)["requests"]
        shown = whole(engine)["blocks"]
        assert state["blocks"] == shown[: len(state["blocks"])]
        assert not any(shown[len(state["blocks"]) :]), "what no look has had is free"


def test_blocks_come_part_by_part_and_then_again() -> None:
    engine = EngineSnapshot(0)
    firsts = []
    for _ in range(4):
        firsts.append(engine.next_block)
        part = b"\1\2\3\4"[: 9 - engine.next_block]
        engine.look(WELCOME, STATS, seen([], engine.next_block, part, 9), 0.0)
    assert firsts == [0, 4, 8, 0]
    assert whole(engine)["blocks"] == b"\1\2\3\4\1\2\3\4\1"


def test_blocks_of_the_host_follow_those_of_the_device() -> None:
    engine = EngineSnapshot(0)
    view = msgspec.structs.replace(seen([], blocks=b"\1\2\3\4\x80"), num_host_blocks=1)
    change = engine.look(WELCOME, STATS, view, 1.0)
    assert (change["first_host_block"], whole(engine)["blocks"]) == (4, b"\1\2\3\4\x80")


# ---- the feed


class Engine:
    """A fake session; `num_asked` is the number of output tokens of its one request."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_there = True

    def ask_each(self, first_block: int | None = None) -> list[Member]:
        if not self.is_there:
            raise EngineDeadError("it died")
        self.num_asked += 1
        stats, view = Future[Any](), Future[Any]()
        stats.set_result(STATS)
        view.set_result(seen([row("r", self.num_asked)], first_block or 0, b"\0\0\0\0"))
        return [Member(0, WELCOME, stats, view)]


def feed_of(engine: Engine) -> tuple[Feed, Any]:
    calls = SimpleNamespace(trouble=None, dispatcher=SimpleNamespace(session=engine))
    return Feed(cast(Calls, calls), interval_s=0.001), calls


async def event(stream: AsyncIterator[bytes]) -> tuple[str, dict[str, Any]]:
    text = (await asyncio.wait_for(anext(stream), scaled(10))).decode()
    kind, data = text.removeprefix("event: ").split("\ndata: ")
    return kind, json.loads(data)["engines"]


async def rest(stream: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The kinds of the events that are left."""
    async for text in stream:
        yield text.decode().split("\n")[0].removeprefix("event: ")


async def test_quick_readers_get_changes_and_slow_ones_everything() -> None:
    engine = Engine()
    feed, calls = feed_of(engine)
    quick, slow = feed.watch(), feed.watch()
    kind, engines = await event(quick)
    assert (kind, engines["0"]["requests"]["r"]["prompt"]) == ("snapshot", 5)
    assert (await event(slow))[0] == "snapshot"
    for _ in range(5):
        kind, engines = await event(quick)
        if kind == "update":
            assert engines["0"]["requests"]["r"].keys() == {"output"}
    while engine.num_asked < 9:
        await event(quick)
    kind, engines = await event(slow)
    assert kind == "snapshot", "it has missed some"
    assert engines["0"]["requests"]["r"]["prompt"] == 5
    engine.is_there = False
    while engines["0"] is not None:
        kind, engines = await event(quick)
        engines = engines or {"0": None}
    calls.trouble = "the server is shutting down"
    with pytest.raises(ApiError, match="shutting down"):
        feed.check()
    assert [kind async for kind in rest(quick)] in ([], ["update"], ["snapshot"]), "it ends"


async def test_without_watchers_the_engine_is_not_asked() -> None:
    engine = Engine()
    feed, _ = feed_of(engine)
    stream = feed.watch()
    await event(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    for _ in range(200):
        await asyncio.sleep(0.001)
        before = engine.num_asked
    assert engine.num_asked == before
    again = feed.watch()
    assert (await event(again))[0] == "snapshot"
    await again.aclose()  # type: ignore[attr-defined]


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_WATCHERS", 1)

    feed, _ = feed_of(Engine())
    feed.check()
    stream = feed.watch()
    await event(stream)
    with pytest.raises(ApiError, match="1 clients watch this server already"):
        feed.check()
    await stream.aclose()  # type: ignore[attr-defined]
    feed.check()
