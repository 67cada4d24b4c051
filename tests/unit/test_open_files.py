"""The limit of open files: a server raises it, as each connection takes one and those above are closed unanswered."""

import asyncio
import resource
import socket
from types import SimpleNamespace
from typing import cast

import pytest
import uvicorn

from tests.deadlines import scaled
from vllm_lite.runtime.machine import MAX_FILES, allow_files
from vllm_lite.server.processes.http_server import started

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "count", "set_to"),
    [
        ((1024, 4096), 2000, (2000, 4096)),
        ((1024, 4096), 10_000, (4096, 4096)),
        ((1024, ENDLESS), 10_000, (10_000, ENDLESS)),
        ((1024, 4096), 1000, None),
        ((4096, 4096), 10_000, None),
        ((ENDLESS, ENDLESS), 10_000, None),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one(
    limits: tuple[int, int], count: int, set_to: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, both: found.append(both))
    allow_files(count)
    assert found == ([] if set_to is None else [set_to])


async def test_a_server_raises_it_before_it_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    async def serve(sockets: list[socket.socket]) -> None:
        assert found == [MAX_FILES]
        assert len(sockets) == 1

    monkeypatch.setattr("resource.getrlimit", lambda _: (64, ENDLESS))
    monkeypatch.setattr("resource.setrlimit", lambda _, both: found.append(both[0]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = SimpleNamespace(started=True, serve=serve)
        await asyncio.wait_for(started(cast("uvicorn.Server", server), listener), scaled(10))
    assert found == [MAX_FILES]
