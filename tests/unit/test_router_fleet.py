"""Requests wait for their models, which fakes of processes load, let sleep, and lose."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.deadlines import scaled
from vllm_lite.errors import EngineError
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router import fleet as module
from vllm_lite.server.router.catalog import Catalog, Entry
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.server.router.fleet import Fleet

GIB = 1 << 30
SIZES = {"unloaded": 0, "loaded": 2 * GIB, "sleeping": GIB // 4}


class FakeBackend:
    """Fake processes, which start at once and use two GiB; `rig` records them."""

    def __init__(self, rig: "Rig", entry: Entry, on_end: Callable[[], None]) -> None:
        self.rig, self.name, self.on_end = rig, entry.name, on_end
        self.pid = len(rig.made) + 1
        self.state = "unloaded"
        self.reason: str | None = None
        rig.made.append(self)

    def ended(self) -> str | None:
        return self.reason

    async def start(self) -> None:
        await self.rig.gate.wait()
        if self.name in self.rig.broken:
            raise EngineError("it is broken")
        self.state = "loaded"
        self.rig.log.append(f"load {self.name}")

    async def sleep(self, level: int) -> None:
        self.state = "sleeping"
        self.rig.log.append(f"sleep {self.name} {level}")

    async def wake(self) -> None:
        if self.name in self.rig.broken:
            raise EngineError("it is broken")
        self.state = "loaded"
        self.rig.log.append(f"wake {self.name}")

    async def stop(self, _: float = 0.0) -> None:
        self.state = "unloaded"
        self.rig.log.append(f"stop {self.name}")

    async def kill(self) -> None:
        self.state = "unloaded"
        self.rig.log.append(f"kill {self.name}")

    def die(self) -> None:
        self.reason = "killed"
        self.on_end()


class Rig:
    def __init__(self, names: str = "a b", pins: str = "", kv: str | None = None, **config: Any) -> None:
        self.log: list[str] = []
        self.made: list[FakeBackend] = []
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        catalog = Catalog()
        for name in names.split():
            catalog.add(Entry(name, ServeConfig(model="demo", kv_cache_dir=kv), pin=name in pins.split()))
        settings = {"models": "x", "models_memory": "3GiB", "models_slice_s": 0.05, **config}
        self.fleet = Fleet(
            catalog, RouterConfig.check(settings), lambda *made: FakeBackend(self, *made), measure=self.sizes
        )
        self.running = asyncio.ensure_future(self.fleet.run())

    def sizes(self, pids: Any) -> dict[int, int]:
        return {pid: SIZES[self.made[pid - 1].state] for pid in pids}

    async def use(self, name: str, hold: "asyncio.Event | None" = None) -> str:
        async with self.fleet.lease(self.fleet.find(name)) as lease:
            if hold is not None:
                await hold.wait()
            return str(lease.backend.name)

    async def stream(self) -> "tuple[asyncio.Future[str], asyncio.Event]":
        """Begin a use of model a, which ends once the event is set."""
        hold = asyncio.Event()
        stream = asyncio.ensure_future(self.use("a", hold))
        await self.until(lambda: self.fleet.members["a"].status.num_active == 1)
        return stream, hold

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(scaled(10)):
            while not condition():  # noqa: ASYNC110 - conditions of several kinds
                await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet_of(**settings: Any) -> AsyncIterator[Rig]:
    """A rig with these settings, whose fleet ends with the context."""
    rig = Rig(**settings)
    try:
        async with asyncio.timeout(scaled(20)):
            yield rig
    finally:
        rig.running.cancel()
        await asyncio.gather(rig.running, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "MEASURE_S", 0.02)
    monkeypatch.setattr(module, "estimate", lambda _: 2 * GIB)


async def test_a_model_is_loaded_for_its_first_request_and_swapped_for_another() -> None:
    async with fleet_of() as rig:
        assert await rig.use("a") == "a"
        assert await rig.use("a") == "a"
        assert rig.log == ["load a"]
        assert await rig.use("b") == "b"
        assert rig.log == ["load a", "sleep a 1", "load b"]
        assert await rig.use("a") == "a"
        assert rig.log[3:] == ["sleep b 1", "wake a"]


async def test_the_most_that_a_sleeping_model_has_taken_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "sleeping", GIB // 2)

    async with fleet_of() as rig:
        await rig.use("a")
        await rig.use("b")
        status = rig.fleet.members["a"].status
        await rig.until(lambda: status.asleep_bytes == GIB // 2)
        assert rig.fleet.members["b"].status.asleep_bytes < GIB // 2, "it is loaded"


@pytest.mark.parametrize(("kv", "writes"), [("/kv", ["sleep a 2"]), (None, [])])
async def test_a_model_that_keeps_chats_on_disk_writes_them_before_it_is_ended(
    kv: str | None, writes: list[str]
) -> None:
    async with fleet_of(kv=kv) as rig:
        await rig.use("a")
        rig.fleet.let_go(rig.fleet.members["a"])
        await rig.until(lambda: rig.fleet.members["a"].state == "unloaded")
        assert rig.log == ["load a", *writes, "stop a"]


async def test_a_requests_keep_alive_ends_with_the_processes() -> None:
    async with fleet_of() as rig:
        member = rig.fleet.members["a"]
        rig.fleet.keep(member, 0.0)
        await rig.use("a")
        await rig.until(lambda: member.state == "unloaded")
        await rig.use("a")
        assert (member.state, member.status.leaves_at_s) == ("loaded", None)


async def test_many_that_wait_share_one_load() -> None:
    async with fleet_of() as rig:
        rig.gate.clear()
        waiting = [asyncio.ensure_future(rig.use("a")) for _ in range(20)]
        await rig.until(lambda: rig.fleet.members["a"].status.num_waiting == 20)
        rig.gate.set()
        assert await asyncio.gather(*waiting) == ["a"] * 20
        assert rig.log == ["load a"]


async def test_a_busy_model_is_paused_after_its_slice_and_its_requests_continue() -> None:
    async with fleet_of() as rig:
        stream, hold = await rig.stream()
        assert await rig.use("b") == "b"
        await rig.until(lambda: "wake a" in rig.log)
        assert rig.log == ["load a", "sleep a 1", "load b", "sleep b 1", "wake a"]
        assert not stream.done()
        hold.set()
        assert await stream == "a"


async def test_the_deadline_of_a_wait() -> None:
    async with fleet_of(models_wait_s=0.1, models_slice_s=100.0) as rig:
        stream, hold = await rig.stream()
        with pytest.raises(
            ApiError, match=r"'b' was not loaded within .*: it is unloaded, and memory is taken by a \(1"
        ) as found:
            await rig.use("b")
        assert found.value.status == 503
        assert "Retry-After" in found.value.headers
        assert rig.fleet.members["b"].status.num_waiting == 0
        assert rig.fleet.members["b"].counts.refusals == 1
        hold.set()
        await stream


async def test_a_model_that_cannot_be_loaded_is_refused_and_the_others_are_served() -> None:
    async with fleet_of() as rig:
        rig.broken.add("a")
        with pytest.raises(ApiError, match="'a' cannot be loaded: it is broken"):
            await rig.use("a")
        await rig.until(lambda: rig.fleet.members["a"].state == "failed")
        with pytest.raises(ApiError, match="it is broken") as found:
            await rig.use("a")
        assert len(rig.made) == 1, "it is not tried again at once"
        assert int(found.value.headers["Retry-After"]) >= 1
        assert await rig.use("b") == "b"
        rig.broken.clear()
        rig.fleet.members["a"].retry_at_s = 0.0
        assert await rig.use("a") == "a"


async def test_the_streams_of_a_model_that_does_not_wake_end_at_once() -> None:
    """A server that is asked to stop would end them as if they were done."""
    async with fleet_of() as rig:
        stream, hold = await rig.stream()
        rig.broken.add("a")
        assert await rig.use("b") == "b"
        await rig.until(lambda: rig.fleet.members["a"].state == "failed")
        assert rig.log == ["load a", "sleep a 1", "load b", "sleep b 1", "kill a"]
        hold.set()
        await stream


async def test_an_entry_with_a_fault_is_refused_for_good() -> None:
    async with fleet_of() as rig:
        rig.fleet.add(Entry("c", None, trouble="c: unknown setting 'x'"))
        rig.fleet.catalog.entries["c"] = rig.fleet.members["c"].entry
        with pytest.raises(ApiError, match="cannot be served: c: unknown setting 'x'"):
            await rig.use("c")


async def test_a_model_that_dies_is_loaded_again_with_growing_pauses() -> None:
    async with fleet_of() as rig:
        for _ in range(module.FREE_DEATHS):
            assert await rig.use("a") == "a"
            rig.made[-1].die()
            await rig.until(lambda: rig.fleet.members["a"].counts.deaths == len(rig.made))
        assert await rig.use("a") == "a"
        rig.made[-1].die()
        await rig.until(lambda: rig.fleet.members["a"].trouble is not None)
        with pytest.raises(ApiError, match="killed"):
            await rig.use("a")
        assert await rig.use("b") == "b"


async def test_an_unused_model_is_unloaded() -> None:
    async with fleet_of(models_idle_s=0.05) as rig:
        await rig.use("a")
        await rig.until(lambda: rig.fleet.members["a"].state == "unloaded")
        assert rig.log == ["load a", "stop a"]


async def test_a_model_that_is_let_go_leaves_with_its_last_request() -> None:
    async with fleet_of() as rig:
        stream, hold = await rig.stream()
        rig.fleet.let_go(rig.fleet.members["a"])
        await asyncio.sleep(0.05)
        assert rig.log == ["load a"]
        hold.set()
        await stream
        await rig.until(lambda: rig.log == ["load a", "stop a"])


async def test_pinned_models_are_loaded_at_the_start_and_stay() -> None:
    async with fleet_of(names="a b c", pins="a", models_memory="4.5GiB") as rig:
        await rig.until(lambda: rig.log == ["load a"])
        assert await rig.use("b") == "b"
        assert rig.log == ["load a", "load b"]
        assert await rig.use("c") == "c"
        assert rig.log == ["load a", "load b", "sleep b 1", "load c"]


async def test_the_end_refuses_waiting_requests_and_ends_all_models() -> None:
    async with fleet_of(models_slice_s=100.0) as rig:
        stream, hold = await rig.stream()
        waiting = asyncio.ensure_future(rig.use("b"))
        await rig.until(lambda: rig.fleet.members["b"].status.num_waiting == 1)
        await rig.fleet.close(0.0)
        assert rig.log == ["load a", "stop a"]
        for refused in (waiting, asyncio.ensure_future(rig.use("a"))):
            with pytest.raises(ApiError, match="shutting down"):
                await refused
        hold.set()
        await stream


async def test_names() -> None:
    async with fleet_of() as rig:
        assert rig.fleet.find("a:latest").entry.name == "a"
        with pytest.raises(ApiError, match="'x' does not exist; this server has a, b") as found:
            rig.fleet.find("x")
        assert found.value.status == 404
        with pytest.raises(ApiError, match="model must be given: one of a, b"):
            rig.fleet.find(None)


async def test_a_model_that_is_deleted_while_its_files_are_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    are_read, begun = threading.Event(), threading.Event()

    def estimated(_: ServeConfig | None) -> int:
        begun.set()
        return GIB * are_read.wait(scaled(20))

    monkeypatch.setattr(module, "estimate", estimated)

    async with fleet_of() as rig:
        asked = asyncio.ensure_future(rig.use("a"))
        await rig.until(begun.is_set)
        await rig.fleet.remove(rig.fleet.members["a"])
        are_read.set()
        with pytest.raises(ApiError, match="the model 'a' was deleted"):
            await asked


async def test_memory_is_estimated_for_the_first_request_and_forgotten_once_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[ServeConfig | None]()

    def estimated(config: ServeConfig | None) -> int:
        asked.append(config)
        return 10 * GIB

    monkeypatch.setattr(module, "estimate", estimated)

    async with fleet_of() as rig:
        assert asked == []
        with pytest.raises(
            ApiError, match=r"it takes 10\.00 GiB, and beside pinned models there is room for 3\.00 GiB"
        ):
            await rig.use("a")
        assert len(asked) == 1
        status = rig.fleet.members["a"].status
        status.least_bytes = status.expected_bytes = 2 * GIB
        assert await rig.use("a") == "a"
        assert len(asked) == 1
