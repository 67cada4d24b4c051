"""The API servers beside the first one: they are replaced if they die or hang, unless that happens too often."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineError
from vllm_lite.runtime import supervise
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes import api_servers as servers_module
from vllm_lite.server.processes.api_servers import (
    AGAIN_S,
    MAX_RESTARTS,
    READY_S,
    WATCH_S,
    ApiServers,
    ApiServerSettings,
)
from vllm_lite.server.processes.scoreboard import Scoreboard

ENGINE = EngineConfig().resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
PATIENCE_S = ENGINE.heartbeat_timeout_s


class FakeChild:
    def __init__(self, number: int, on_exit: Callable[[str], None], fds: tuple[int, ...]) -> None:
        self.number, self.on_exit, self.fds, self.pid = number, on_exit, fds, 10 + number
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


class Rig:
    """`count` servers on a clock of the test's, alive as soon as they are spawned unless `are_slow`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2, *, are_slow: bool = False) -> None:
        self.now_s = 100.0
        self.spawned: list[FakeChild] = []
        self.killed: list[tuple[int, int]] = []
        self.board = Scoreboard(count + 1)
        self.others = [Scoreboard(count + 1, number, self.board.fd) for number in range(1, count + 1)]
        self.closed: list[int] = []

        def spawn(_: str, settings: ApiServerSettings, _name: str, on_exit: Any, *, fds: tuple[int, ...]) -> FakeChild:
            self.spawned.append(FakeChild(settings.number, on_exit, fds))
            if not are_slow:
                self.others[settings.number - 1].report_alive()
            return self.spawned[-1]

        monkeypatch.setattr(supervise, "spawn", spawn)
        monkeypatch.setattr(os, "kill", lambda pid, number: self.killed.append((pid, number)))
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(servers_module, "time", clock)
        monkeypatch.setattr("vllm_lite.server.processes.scoreboard.time", clock)
        config = ServeConfig(shutdown_timeout=3.0)
        settings = [
            ApiServerSettings(config, Keys(), ENGINE, ("ipc://e",), number, 40 + number, self.board.fd)
            for number in range(1, count + 1)
        ]
        listener: Any = SimpleNamespace(close=lambda: self.closed.append(1))
        self.servers = ApiServers(settings, self.board, [listener])

    async def start(self) -> None:
        await self.servers.start()
        self.servers.looked_s = self.now_s

    def look(self, passed_s: float, alive: tuple[int, ...] = ()) -> None:
        """A look every second while time passes, as in watch()."""
        for _ in range(int(passed_s / WATCH_S)):
            self.now_s += WATCH_S
            for number in alive:
                self.others[number - 1].report_alive()
            self.servers.kill_hung(self.now_s)


async def test_a_server_that_dies_is_started_again_with_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    await rig.start()
    rig.others[1].report_load(7)
    rig.spawned[1].die()
    assert rig.servers.restart_ended() is None
    fd = rig.board.fd
    assert [(child.number, child.fds) for child in rig.spawned] == [(1, (41, fd)), (2, (42, fd)), (2, (42, fd))]
    assert rig.board.loads() == [0, 0, 0]
    assert rig.servers.restart_ended() is None
    assert len(rig.spawned) == 3


async def test_a_server_that_dies_over_and_over_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1)
    await rig.start()
    for _ in range(MAX_RESTARTS):
        rig.spawned[-1].die()
        assert rig.servers.restart_ended() is None
    rig.spawned[-1].die()
    reason = rig.servers.restart_ended()
    assert reason is not None
    assert "6 times" in reason
    assert "SIGKILL" in reason
    assert rig.servers.restart_ended() == rig.servers.trouble == reason
    assert len(rig.spawned) == MAX_RESTARTS + 1


async def test_deaths_far_apart_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1)
    await rig.start()
    for _ in range(3 * MAX_RESTARTS):
        rig.now_s += 20.0
        rig.spawned[-1].die()
        assert rig.servers.restart_ended() is None


async def test_a_server_that_gives_no_sign_of_life_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    await rig.start()
    rig.look(PATIENCE_S, alive=(1,))
    assert rig.killed == []
    rig.look(WATCH_S, alive=(1,))
    assert rig.killed == [(12, signal.SIGKILL)]
    rig.spawned[1].die()
    rig.look(2 * PATIENCE_S, alive=(1,))
    assert len(rig.killed) == 1


async def test_a_restarted_server_has_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    await rig.start()
    rig.spawned[1].die()
    rig.servers.restart_ended()
    rig.board.clear(2)
    rig.look(READY_S, alive=(1,))
    assert rig.killed == []
    rig.look(WATCH_S, alive=(1,))
    assert rig.killed == [(12, signal.SIGKILL)]


async def test_silence_while_the_watcher_itself_was_stopped_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is stopped and continued: all are silent for as long as the first one cannot look."""
    rig = Rig(monkeypatch)
    await rig.start()
    rig.now_s += 10 * PATIENCE_S
    rig.look(AGAIN_S)
    assert rig.killed == []
    rig.look(2 * WATCH_S, alive=(1,))
    assert rig.killed[0] == (12, signal.SIGKILL)
    assert {pid for pid, _ in rig.killed} == {12}


async def test_the_end_is_not_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)

    await rig.servers.start()
    rig.servers.stop()
    await rig.servers.ended()
    assert rig.servers.restart_ended() is None
    assert [child.graces for child in rig.spawned] == [[8.0], [8.0]]
    assert rig.closed == [1]


async def test_only_a_second_signal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second signal cuts off the requests that they still serve."""
    rig = Rig(monkeypatch)
    monkeypatch.setattr(FakeChild, "stop", lambda _self, _grace_s: None)

    await rig.servers.start()
    rig.servers.stop()
    rig.servers.stop()
    assert rig.killed == []
    rig.spawned[0].reason = "exit status 0"
    rig.servers.stop_now()
    await rig.servers.ended()
    assert rig.killed == [(12, signal.SIGTERM)]


async def test_a_server_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, are_slow=True)
    starting = asyncio.ensure_future(rig.servers.start())
    await asyncio.sleep(0)
    rig.spawned[0].die()
    with pytest.raises(EngineError, match="API server 1 did not start: killed by SIGKILL"):
        await starting


def test_servers_see_each_others_loads() -> None:
    first = Scoreboard(3)
    second = Scoreboard(3, 1, first.fd)
    second.report_load(4)
    assert first.alive_s(1) == 0
    second.report_alive()
    assert (first.loads(), second.loads()) == ([0, 4, 0], [0, 4, 0])
    assert first.alive_s(1) > 0 == first.alive_s(2)
    first.clear(1)
    assert (second.loads(), second.alive_s(1)) == ([0, 0, 0], 0)
    first.count_rejection("max_num_queued_tokens")
    second.count_rejection("max_num_queued_tokens")
    first.clear(1)
    assert first.rejections() == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 2}, "of one that has ended, too"
    alone = Scoreboard()
    alone.report_load(2)
    assert alone.loads() == [2]
