"""Connections against clients that send without reading, or do not read: what is kept of them, and for how long."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from tests.deadlines import scaled
from vllm_lite.server.http import connection as connection_module
from vllm_lite.server.http.connection import MAX_UNPARSED_BYTES, PIECE_BYTES, HttpConnection, with_timeouts
from vllm_lite.server.processes import http_server as service_module
from vllm_lite.server.processes.http_server import _Uvicorn

DEADLINE_S = scaled(30.0)
WRITE_TIMEOUT_S = scaled(20.0)
READ_BYTES = 256 * 1024
"""What uvloop reads at most at once."""
BIG, PART_BYTES = 64 << 20, 8 << 20
"""Both are more than the kernel holds for a connection."""
GET = b"GET /%d HTTP/1.1\r\n\r\n"


class App:
    """Remembers the paths it is asked for; answers each with `body`, once it may."""

    def __init__(self, body: bytes = b"*") -> None:
        self.body = body
        self.paths: list[str] = []
        self.gone: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        while (await receive()).get("more_body"):
            pass
        answering, leaving = asyncio.ensure_future(self.may_answer.wait()), asyncio.ensure_future(receive())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not self.may_answer.is_set():
            self.gone.append(scope["path"])
        answering.cancel()
        leaving.cancel()
        length = b"%d" % len(self.body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": self.body})


class Bench:
    """A server with one app, and a client's socket."""

    def __init__(self, app: App, *, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        kind = with_timeouts(60.0, write_timeout_s)
        config = uvicorn.Config(app, http=kind, ws="none", loop="none", lifespan="off", log_config=None)
        self.server = _Uvicorn(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.client = socket.socket()
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def __aenter__(self) -> Self:
        self.serving = asyncio.ensure_future(self.server.serve(sockets=[self.listener]))
        await self.until(lambda: self.server.started)
        self.client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.client, self.listener.getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        await self.serving

    @property
    def connection(self) -> HttpConnection:
        (one,) = self.server.server_state.connections
        assert isinstance(one, HttpConnection)
        return one

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.get_running_loop().sock_sendall(self.client, data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """What comes, until the end."""
        async with asyncio.timeout(DEADLINE_S):
            while piece := await asyncio.get_running_loop().sock_recv(self.client, 1 << 20):
                yield piece

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - conditions of several kinds
                await asyncio.sleep(0.001)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("body", [b"", b"x" * 100, b"x" * 10_000])
def test_what_waits_behind_a_request_is_bounded_and_answered_in_order(body: bytes) -> None:
    """Far more than the bound is sent before anything is answered, and nothing of it is lost."""

    async def main() -> None:
        app = App()
        app.may_answer.clear()
        head = b"POST /%d HTTP/1.1\r\nContent-Length: " + b"%d\r\n\r\n" % len(body)
        count = 400_000 // (len(head) + len(body))
        async with Bench(app) as bench:
            sending = asyncio.ensure_future(bench.send(b"".join(head % place + body for place in range(count))))
            await bench.until(lambda: bool(bench.server.server_state.connections))
            await bench.until(lambda: len(bench.connection._unparsed) >= MAX_UNPARSED_BYTES)
            assert bench.connection.flow.read_paused
            assert len(bench.connection._unparsed) <= MAX_UNPARSED_BYTES + READ_BYTES
            assert len(bench.connection.pipeline) <= PIECE_BYTES // len(head)
            assert sum(len(cycle.body) for cycle, _ in bench.connection.pipeline) <= PIECE_BYTES
            assert app.paths == ["/0"]
            app.may_answer.set()
            await sending
            num_answers = 0
            async for data in bench.pieces():
                num_answers += data.count(b"*")
                if num_answers == count:
                    break
            assert app.paths == [f"/{place}" for place in range(count)]

    run(main)


def test_headers_and_bodies_come_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        app = App()
        async with Bench(app) as bench:
            request = b"POST /%d HTTP/1.1\r\nX: y\r\nContent-Length: 5\r\n\r\nabcde"
            await bench.send(b"".join(request % place for place in range(9)))
            await bench.until(lambda: len(app.paths) == 9)
            assert app.paths == [f"/{place}" for place in range(9)]

    for size in (1, 7, 50):
        monkeypatch.setattr(connection_module, "PIECE_BYTES", size)
        run(main)


def test_a_client_that_goes_is_missed_behind_requests_that_wait() -> None:
    async def main() -> None:
        app = App()
        app.may_answer.clear()
        async with Bench(app) as bench:
            await bench.send(b"".join(GET % place for place in range(1000)))
            await bench.until(lambda: bool(app.paths))
            bench.client.close()
            await bench.until(lambda: bool(app.gone))
            assert app.paths == ["/0"]

    run(main)


def test_a_client_that_does_not_read_a_whole_answer_is_cut_off() -> None:
    async def main() -> None:
        app = App(b"x" * BIG)
        async with Bench(app, write_timeout_s=0.3) as bench:
            await bench.send(GET % 1)
            await bench.until(lambda: bool(app.paths))
            await bench.until(lambda: not bench.server.server_state.connections)
            assert sum([len(piece) async for piece in bench.pieces()]) < BIG

    run(main)


def test_a_client_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more than half of the time for each part of an answer that has many."""
    monkeypatch.setattr(service_module, "TICKS_TO_LOOK", 10**9)

    async def main() -> None:
        async with Bench(App(b"x" * BIG)) as bench:
            await bench.send(GET % 1)
            got, now_s = 0, 0.0
            async for piece in bench.pieces():
                got += len(piece)
                if got // PART_BYTES > now_s / (0.6 * WRITE_TIMEOUT_S):
                    now_s += 0.6 * WRITE_TIMEOUT_S
                    if bench.server.server_state.connections:  # it may be over: the rest is on its way
                        bench.connection.look(now_s)
                if got > BIG:
                    break
            assert got > BIG
            assert now_s > 2 * WRITE_TIMEOUT_S

    run(main)
