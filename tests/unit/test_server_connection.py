"""Connections against clients that send without reading, or do not read: what is kept of them, and for how long."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Self

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from tests.deadlines import scaled
from vllm_lite.server.http import connection as connection_module
from vllm_lite.server.http.connection import (
    MAX_HEADER_BYTES,
    MAX_UNPARSED_BYTES,
    PIECE_BYTES,
    HttpConnection,
    with_timeouts,
)
from vllm_lite.server.processes import http_server as service_module
from vllm_lite.server.processes.http_server import Uvicorn

DEADLINE_S = scaled(30.0)
WRITE_TIMEOUT_S = scaled(20.0)
READ_BYTES = 256 * 1024
"""Maximum bytes that uvloop reads at once."""
BIG, PART_BYTES = 64 << 20, 8 << 20
"""Both exceed the kernel's buffers of a connection."""
GET = b"GET /%d HTTP/1.1\r\n\r\n"


class App:
    """Remembers the paths it is asked for; answers each with `body`, once it may."""

    def __init__(self, body: bytes = b"*") -> None:
        self.body = body
        self.paths: list[str] = []
        self.asked: list[tuple[dict[bytes, bytes], bytes]] = []
        self.gone: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.asked.append((dict(scope["headers"]), body))
        answering, leaving = asyncio.ensure_future(self.may_answer.wait()), asyncio.ensure_future(receive())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not self.may_answer.is_set():
            self.gone.append(scope["path"])
        answering.cancel()
        leaving.cancel()
        await self.answer(send)

    async def answer(self, send: Send) -> None:
        length = b"%d" % len(self.body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": self.body})


class Streaming(App):
    """Answers in pieces, and does not say how many bytes they are."""

    async def answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for place in range(len(self.body)):
            await send({"type": "http.response.body", "body": self.body[place : place + 1], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Bench:
    """A server with one app, and a client's socket."""

    def __init__(self, app: App, *, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        kind = with_timeouts(60.0, write_timeout_s)
        config = uvicorn.Config(app, http=kind, ws="none", loop="none", lifespan="off", log_config=None)
        self.server = Uvicorn(config)
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
        """Yield the pieces of the answer, until the end."""
        async with asyncio.timeout(DEADLINE_S):
            while piece := await asyncio.get_running_loop().sock_recv(self.client, 1 << 20):
                yield piece

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - conditions of several kinds
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let uvicorn check a thousand times a second, instead of ten times, whether it is to end."""
    quick = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 100)})
    monkeypatch.setattr(uvicorn.server, "asyncio", quick)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The server's own loop."""
    return "asyncio", {"loop_factory": uvloop.new_event_loop}


@pytest.mark.parametrize("body", [b"", b"x" * 100, b"x" * 10_000])
async def test_pipelined_requests_are_limited_and_answered_in_order(body: bytes) -> None:
    """Far more than the bound is sent before anything is answered, and nothing of it is lost."""

    app = App()
    app.may_answer.clear()
    head = b"POST /%d HTTP/1.1\r\nContent-Length: " + b"%d\r\n\r\n" % len(body)
    count = 400_000 // (len(head) + len(body))
    async with Bench(app) as bench:
        sending = asyncio.ensure_future(bench.send(b"".join(head % place + body for place in range(count))))
        await bench.until(lambda: bool(bench.server.server_state.connections))
        await bench.until(lambda: len(bench.connection.unparsed) >= MAX_UNPARSED_BYTES)
        assert bench.connection.flow.read_paused
        assert len(bench.connection.unparsed) <= MAX_UNPARSED_BYTES + READ_BYTES
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


@pytest.mark.parametrize("size", [1, 7, 50])
async def test_headers_and_bodies_come_in_pieces_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PIECE_BYTES", size)
    app = App()
    async with Bench(app) as bench:
        request = b"POST /%d HTTP/1.1\r\nX: y\r\nContent-Length: 5\r\n\r\nabcde"
        await bench.send(b"".join(request % place for place in range(9)))
        await bench.until(lambda: len(app.paths) == 9)
        assert app.paths == [f"/{place}" for place in range(9)]


async def test_a_disconnect_is_noticed_behind_pipelined_requests() -> None:
    app = App()
    app.may_answer.clear()
    async with Bench(app) as bench:
        await bench.send(b"".join(GET % place for place in range(1000)))
        await bench.until(lambda: bool(app.paths))
        bench.client.close()
        await bench.until(lambda: bool(app.gone))
        assert app.paths == ["/0"]


async def test_a_client_that_does_not_read_a_whole_answer_is_cut_off() -> None:
    app = App(b"x" * BIG)
    async with Bench(app, write_timeout_s=0.3) as bench:
        await bench.send(GET % 1)
        await bench.until(lambda: bool(app.paths))
        await bench.until(lambda: not bench.server.server_state.connections)
        assert sum([len(piece) async for piece in bench.pieces()]) < BIG


async def test_a_client_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client takes more than half of the limit for each of many parts of an answer."""
    monkeypatch.setattr(service_module, "TICKS_TO_LOOK", 10**9)

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


OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n",
    b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Upgrade: TLS/1.3\r\nUpgrade: x/2\r\nconnection: UPGRADE\r\n",
)
BODIES = (b"Content-Length: 7\r\n\r\nGET / H", b"Transfer-Encoding: chunked\r\n\r\n3\r\nGET\r\n4\r\n / H\r\n0\r\n\r\n")


@pytest.mark.parametrize("body", BODIES, ids=["length", "chunks"])
@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "several"])
@pytest.mark.parametrize("size", [1, 33, 100_000])
async def test_an_offer_of_another_protocol_changes_nothing(offer: bytes, body: bytes, size: int) -> None:
    """Several requests on one connection, and their bodies, in packets of any size, with and without waiting."""

    app = App()
    async with Bench(app) as bench:
        requests = [b"POST /%d HTTP/1.1\r\nX: y\r\n%b%b" % (place, offer, body) for place in range(6)]
        requests[3] = GET % 3
        for data in (*requests[:2], b"".join(requests[2:])):
            for place in range(0, len(data), size):
                await bench.send(data[place : place + size])
                await asyncio.sleep(0)
        await bench.until(lambda: len(app.asked) == 6)
    assert app.paths == [f"/{place}" for place in range(6)]
    assert [body for _, body in app.asked] == [b"GET / H"] * 3 + [b""] + [b"GET / H"] * 2
    assert all(headers.get(b"x") == b"y" and b"upgrade" not in headers for headers, _ in app.asked[:3])


async def test_a_proxy_s_tunnel_is_refused_by_one_sentence() -> None:
    app = App()
    async with Bench(app) as bench:
        await bench.send(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")
        answer = b"".join([piece async for piece in bench.pieces()])
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"CONNECT is for proxies" in answer
    assert app.paths == []


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("kind", [App, Streaming])
@pytest.mark.parametrize("version", [b"1.0", b"0.9", b"2.0"])
async def test_a_client_that_knows_no_chunks_gets_none(kind: type[App], method: bytes, version: bytes) -> None:
    """The end of the connection is the end of the answer, also if the client would keep it."""

    app = kind(b"a story")
    async with Bench(app) as bench:
        expects = b"Connection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"
        await bench.send(b"%b /1 HTTP/%b\r\n%b" % (method, version, expects))
        answer = b"".join([piece async for piece in bench.pieces()])
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == (b"a story" if method == b"GET" else b"")
    assert b"chunked" not in head
    assert (b"content-length" in head) == (kind is App)
    assert b"connection: close" in head


async def test_a_stream_to_other_clients_is_chunked_and_their_connection_kept() -> None:
    async with Bench(Streaming(b"ab")) as bench:
        await bench.send(GET % 1 + GET % 2)
        got = b""
        async for piece in bench.pieces():
            got += piece
            if got.count(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n") == 2:
                break
        assert b"connection: close" not in got


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://example.org:80/1?x", "/1", b"example.org:80"),
        (b"HTTP://user@[::1]", "/", b"[::1]"),
        (b"https://a?b", "/", b"a"),
        (b"//a/b", "//a/b", b"of-the-header"),
    ],
)
async def test_a_whole_url_names_the_host(target: bytes, path: str, host: bytes) -> None:
    app = App()
    async with Bench(app) as bench:
        await bench.send(b"GET %b HTTP/1.1\r\nHost: of-the-header\r\n\r\n" % target)
        await bench.until(lambda: bool(app.asked))
    assert app.paths == [path]
    assert app.asked[0][0][b"host"] == host


GARBAGE = (
    b"\x00\x01\x02\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: ",
)


@pytest.mark.parametrize("garbage", GARBAGE, ids=["bytes", "version", "tunnel", "headers"])
async def test_invalid_data_after_a_request_does_not_answer_it(garbage: bytes) -> None:
    """Both requests before the invalid data are answered completely, then the connection ends; later data is not
    kept."""

    app = Streaming(b"x")
    app.may_answer.clear()
    async with Bench(app) as bench:
        await bench.send(GET % 1 + GET % 2 + garbage)
        sending = asyncio.ensure_future(bench.send(b"y" * 1_000_000))
        await bench.until(lambda: bool(app.paths))
        await sending
        assert len(bench.connection.unparsed) <= MAX_UNPARSED_BYTES + READ_BYTES
        app.may_answer.set()
        answer = b"".join([piece async for piece in bench.pieces()])
    assert app.paths == ["/1", "/2"]
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"0\r\n\r\n") == 2
    assert answer.count(b"HTTP/1.1 ") == 2


async def test_headers_without_end_behind_a_request_are_not_kept() -> None:
    app = App()
    app.may_answer.clear()
    async with Bench(app) as bench:
        await bench.send(GET % 1 + b"GET / HTTP/1.1\r\nX: ")
        await bench.until(lambda: bool(app.paths))
        await bench.send(b"y" * 2_000_000)
        await bench.until(lambda: bench.connection._is_over)
        assert bench.connection.header_bytes <= MAX_HEADER_BYTES + PIECE_BYTES
        await bench.send(b"y" * 2_000_000)
        assert bench.connection.header_bytes <= MAX_HEADER_BYTES + PIECE_BYTES
        app.may_answer.set()
        answer = b"".join([piece async for piece in bench.pieces()])
    assert answer.endswith(b"*")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_invalid_data_in_a_body_answers_its_request() -> None:
    async with Bench(App()) as bench:
        await bench.send(b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab")
        await bench.send(b"\r\nno chunk\r\n")
        answer = b"".join([piece async for piece in bench.pieces()])
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert answer.count(b"HTTP/1.1 ") == 1
