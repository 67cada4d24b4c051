"""The API servers beside the first: what is done when they die, and what when they die too often."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deadlines import scaled
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineError
from vllm_lite.runtime import supervise
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes import api_servers as family_module
from vllm_lite.server.processes.api_servers import MAX_RESTARTS, ApiSettings, Family


class FakeChild:
    def __init__(self, number: int, on_exit: Callable[[str], None], fds: tuple[int, ...]) -> None:
        self.number, self.on_exit, self.fds, self.pid = number, on_exit, fds, 0
        self.name = f"API server {number}"
        self.reason: str | None = None
        self.graces: list[float] = []

    def die(self) -> None:
        self.reason = "killed by SIGKILL"
        self.on_exit(self.reason)

    def exited(self) -> str | None:
        return self.reason

    def stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        self.reason = "exit status 0"
        self.on_exit(self.reason)


@pytest.fixture
def born(monkeypatch: pytest.MonkeyPatch) -> list[FakeChild]:
    children: list[FakeChild] = []

    def spawn(_module: str, settings: ApiSettings, _name: str, on_exit: Any, *, fds: tuple[int, ...]) -> FakeChild:
        children.append(FakeChild(settings.number, on_exit, fds))
        return children[-1]

    monkeypatch.setattr(supervise, "spawn", spawn)
    return children


def make(count: int = 2, close: Callable[[], None] = lambda: None) -> Family:
    config, engine = (
        ServeConfig(shutdown_timeout=3.0),
        EngineConfig().resolve(max_position_embeddings=1000, dtype="float32", model_path="m"),
    )
    return Family(
        [ApiSettings(config, Keys(), engine, "ipc://e", "/r", number, 40 + number) for number in range(1, count + 1)],
        close,
    )


async def up(_number: int, _timeout_s: float) -> bool:
    return True


def test_one_that_dies_is_started_again_with_its_socket(born: list[FakeChild]) -> None:
    family = make()
    asyncio.run(family.start(up))
    born[1].die()
    assert family.look() is None
    assert [(child.number, child.fds) for child in born] == [(1, (41,)), (2, (42,)), (2, (42,))]
    assert family.look() is None
    assert len(born) == 3


def test_one_that_dies_over_and_over_ends_the_family(born: list[FakeChild]) -> None:
    family = make(1)
    asyncio.run(family.start(up))
    for _ in range(MAX_RESTARTS):
        born[-1].die()
        assert family.look() is None
    born[-1].die()
    reason = family.look()
    assert reason is not None
    assert "6 times" in reason
    assert "SIGKILL" in reason
    assert family.look() == reason
    assert len(born) == MAX_RESTARTS + 1


def test_deaths_far_apart_do_not_add_up(born: list[FakeChild], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(family_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    family = make(1)
    asyncio.run(family.start(up))
    for _ in range(3 * MAX_RESTARTS):
        now_s += 20.0
        born[-1].die()
        assert family.look() is None


@pytest.mark.parametrize("has_been_up", [True, False])
def test_one_that_does_not_answer_is_killed_and_started_again(
    born: list[FakeChild], monkeypatch: pytest.MonkeyPatch, has_been_up: bool
) -> None:
    """Asked twice in vain; one that is still starting has its time for that."""
    now_s, hangs = 0.0, False
    asked: list[tuple[int, float]] = []

    async def answers(number: int, timeout_s: float) -> bool:
        nonlocal now_s
        await asyncio.sleep(0)
        if number == 2 and hangs:
            asked.append((number, timeout_s))
            now_s += timeout_s
            return False
        return True

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (12, signal.SIGKILL)
        assert now_s > (0 if has_been_up else family_module.READY_S)
        born[1].die()

    monkeypatch.setattr(family_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(family_module, "WATCH_S", 0.0)
    monkeypatch.setattr(os, "kill", kill)
    family = make(2)

    async def main() -> None:
        nonlocal hangs
        await family.start(answers)
        born[0].pid, born[1].pid = 11, 12
        hangs = not has_been_up
        watching = asyncio.ensure_future(family.watch(answers))
        for _ in range(20):
            await asyncio.sleep(0)
        hangs = True
        async with asyncio.timeout(scaled(10.0)):
            while born[1].reason is None:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        assert family.look() is None
        watching.cancel()

    asyncio.run(main())
    assert asked[:2] == [(2, EngineConfig().heartbeat_timeout_s), (2, family_module.AGAIN_S)]
    assert [child.number for child in born] == [1, 2, 2]


def test_the_end_is_not_a_death(born: list[FakeChild]) -> None:
    closed: list[int] = []
    family = make(2, lambda: closed.append(1))

    async def main() -> None:
        await family.start(up)
        family.stop()
        await family.ended()

    asyncio.run(main())
    assert family.look() is None
    assert [child.graces for child in born] == [[8.0], [8.0]]
    assert closed == [1]


def test_only_who_hurries_them_signals_again(born: list[FakeChild], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal cuts off the requests that they still serve."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(FakeChild, "stop", lambda _self, _grace_s: None)
    family = make(2)

    async def main() -> None:
        await family.start(up)
        born[0].pid, born[1].pid = 11, 12
        family.stop()
        family.stop()
        assert killed == []
        born[0].reason = "exit status 0"
        family.hurry()
        await family.ended()

    asyncio.run(main())
    assert killed == [(12, signal.SIGTERM)]


def test_one_that_does_not_start_is_an_error(born: list[FakeChild]) -> None:
    async def down(number: int, _timeout_s: float) -> bool:
        if not born[number - 1].reason:
            born[number - 1].die()
        return False

    with pytest.raises(EngineError, match="API server 1 did not start: killed by SIGKILL"):
        asyncio.run(make().start(down))
