"""Streams over HTTP that continue on other connections after theirs broke: two API servers, real sockets."""

import json
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.deadlines import patience, scaled
from tests.e2e.light_worker import STEP_S
from tests.http_server import Server, children, serving, short_socket, until
from tests.unit.resumable_stage import content, events_in
from vllm_lite.client.engines.session import Session

PACED: dict[str, Any] = {"env": {STEP_S: "0.005"}, "light": True}
DEADLINE_S = scaled(60.0)
RESUME_S = 1.5
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 250,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "resumable": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        flags = ["--address", short_socket(Path(folder)), "--api-server-count", "2"]
        flags += ["--num-gpu-blocks-override", "4096", "--stream-resume-s", str(patience(RESUME_S))]
        with serving(*flags, "--api-key", "mine", "--api-key", "another", **PACED) as server:
            yield server


@pytest.fixture
def connect(server: Server) -> Iterator["Connect"]:
    """Makes connections, which are closed with the test."""
    with ExitStack() as stack:
        yield partial(Wire, stack, server)


class Wire:
    """One connection to one of the API servers."""

    def __init__(self, stack: ExitStack, server: Server, number: int | None = None, key: str = "mine") -> None:
        """`number` is the server's; None takes any. It is closed with `stack`."""
        self.data = b""
        stack.callback(self.close)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(200):  # the kernel chooses the server of a connection
            self._http = HTTPConnection(host, int(port), timeout=DEADLINE_S)
            answer = self.ask("GET", "/load")
            if number in (None, json.loads(answer.read()).get("server")):
                return
            self.close()
        raise AssertionError(f"server {number} does not answer")

    def ask(self, method: str, path: str, body: Any = None, last: str = "") -> HTTPResponse:
        headers = {**self._headers, **({"Last-Event-ID": last} if last else {})}
        self._http.request(method, path, None if body is None else json.dumps(body), headers)
        self._answer = self._http.getresponse()
        return self._answer

    def start(self, body: dict[str, Any], name: str) -> None:
        assert self.ask("POST", "/v1/chat/completions", {**body, "request_id": name}).status == 200

    def resume(self, name: str, last: str = "") -> None:
        answer = self.ask("GET", f"/v1/requests/chatcmpl-{name}/stream", last=last)
        assert answer.status == 200, answer.read()
        assert (answer.getheader("content-type") or "").startswith("text/event-stream")

    def read(self, most: int | None = None) -> bytes:
        """Read the stream to its end, or `most` bytes of it: one that is fast would be at its end with some more."""
        while most is None or len(self.data) < most:
            piece = self._answer.read1(65536 if most is None else most - len(self.data))
            if not piece:
                break
            self.data += piece
        return self.data

    def shut(self) -> None:
        self._http.sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        self._http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._answer.close()
        self._http.close()

    def stay(self) -> None:
        """Stay connected without reading."""


Connect = Callable[..., Wire]
Expected = Callable[..., dict[Any, Any]]


def shown(*pieces: bytes) -> dict[Any, Any]:
    return content([data for piece in pieces for _, data in events_in(piece)])


@pytest.fixture(scope="module")
def expected(server: Server) -> Expected:
    """Contents of uninterrupted streams. Each is requested only once, because the server is slow on purpose."""
    known: dict[str, bytes] = {}

    def find(**changes: Any) -> dict[Any, Any]:
        if (key := json.dumps(changes)) not in known:
            with ExitStack() as stack:
                wire = Wire(stack, server)
                wire.start({**CHAT, "resumable": False, **changes}, f"whole-{len(known)}")
                known[key] = wire.read()
        assert b"id: " not in known[key]
        return shown(known[key])

    return find


def broken(connect: Connect, name: str, numbers: list[int], end: Callable[[Wire], None], **changes: Any) -> Any:
    """Read a stream over one connection to each of these servers in turn, each cut in the middle of an event. Returns
    the text of all connections."""
    wires: list[Wire] = []
    last = ""
    for place, number in enumerate(numbers):
        wire = connect(number)
        wire.resume(name, last) if place else wire.start({**CHAT, **changes}, name)
        wires.append(wire)
        if place == len(numbers) - 1:
            wire.read()
            break
        wire.read(1777)
        while not (events := events_in(wire.data)):  # an event of several tokens, as slow clients get them, is longer
            wire.read(len(wire.data) + 1777)
        assert events[-1][1] != "[DONE]"
        last = events[-1][0]
        end(wire)
    return shown(*(wire.data for wire in wires))


@pytest.mark.parametrize("end", [Wire.shut, Wire.reset, Wire.stay])
def test_a_stream_continues_over_other_connections(
    connect: Connect, expected: Expected, end: Callable[[Wire], None]
) -> None:
    changes = {"n": 2, "logprobs": True, "top_logprobs": 1}
    whole = expected(**changes)
    found = broken(connect, f"cut-{end.__name__}", [0, 0, 0, 0], end, **changes)
    for choice in (0, 1):
        assert [entry["token"] for entry in found[choice].pop("scores")] == [
            entry["token"] for entry in whole[choice].pop("scores")
        ]
    assert found[0] == whole[0]
    assert found["usage"][0]["completion_tokens"] == whole["usage"][0]["completion_tokens"] == 500
    assert found["done"] == 1


def test_a_stream_continues_at_the_other_server_and_back(
    connect: Connect, expected: Expected, session: Session
) -> None:
    whole = expected()
    found = broken(connect, "wander", [0, 1, 0, 1], Wire.shut)
    assert found[0] == whole[0]
    assert (found["done"], found["errors"]) == (1, [])
    until(lambda: session.stats().num_used_blocks == 0, "the end of all that ran")


def test_several_samples_stay_at_their_server(connect: Connect) -> None:
    wire = connect(0)
    wire.start({**CHAT, "n": 2, "max_tokens": 1000}, "several")
    wire.read(500)
    wire.shut()
    refused = connect(1).ask("GET", "/v1/requests/chatcmpl-several/stream")
    assert refused.status == 409
    assert b"connect again" in refused.read()
    assert connect(1).ask("DELETE", "/v1/requests/chatcmpl-several").status == 200


def test_an_abandoned_stream_is_kept_for_a_while(connect: Connect, session: Session) -> None:
    wire = connect(0)
    before = session.stats()
    wire.start({**CHAT, "max_tokens": 2000, "n": 16}, "gone")
    wire.read(500)
    wire.shut()
    unread = session.stats().generated_tokens
    until(lambda: session.stats().generated_tokens > unread + 20, "tokens without a reader")
    state = json.loads(connect(0).ask("GET", "/v1/requests/chatcmpl-gone").read())
    assert (state["state"], state["resumable"]) == ("running", True)
    assert state["disconnected_s"] >= 0
    until(lambda: session.stats().ended_by["abort"] > before.ended_by["abort"], "the end of what nobody came back for")
    assert session.stats().generated_tokens < before.generated_tokens + 16 * 2000
    refused = connect(0).ask("GET", "/v1/requests/chatcmpl-gone/stream")
    assert refused.status == 404
    assert b"can be resumed" in refused.read()


def test_the_end_is_said_again_and_only_to_its_owner(connect: Connect) -> None:
    wire = connect(0)
    wire.start({**CHAT, "max_tokens": 10}, "short")
    events = events_in(wire.read())
    path = "/v1/requests/chatcmpl-short/stream"
    hidden = connect(0, "another").ask("GET", path)
    unknown = connect(0, "another").ask("GET", path.replace("short", "none"))
    assert hidden.status == unknown.status == 404
    assert hidden.read() == unknown.read().replace(b"none", b"short")
    done = connect(0).ask("GET", path, last=events[-1][0])
    assert (done.status, done.read()) == (204, b"")
    again = connect(0)
    again.resume("short", events[-2][0])
    assert events_in(again.read()) == events[-1:]
    wrong = connect(0).ask("GET", path, last="no id")
    assert wrong.status == 400
    assert b"not a place in the stream" in wrong.read()
    assert connect(0).ask("DELETE", "/v1/requests/chatcmpl-short").status == 200
    assert connect(0).ask("GET", path).status == 404


def test_ids_do_not_disturb_the_package_of_openai(server: Server) -> None:
    api = OpenAI(base_url=server.url + "/v1", api_key="mine", max_retries=0)
    texts = []
    for resumable in (True, False):
        extra = {"ignore_eos": True, "resumable": resumable}
        stream = api.chat.completions.create(
            model="demo_model",
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=30,
            temperature=0,
            stream=True,
            extra_body=extra,
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("whose", ["vllm_lite.worker.process", "vllm_lite.engine.process"])
def test_streams_continue_when_a_process_is_killed(
    server: Server, connect: Connect, expected: Expected, whose: str
) -> None:
    """Over connections that live, and over one that breaks while nothing can answer."""
    whole = expected()
    name = whose.split(".")[1]
    plain, resumable, cut = connect(), connect(0), connect(0)
    for wire, call in ((plain, "plain"), (resumable, "resumable"), (cut, "cut")):
        wire.start({**CHAT, "resumable": wire is not plain}, f"{call}-{name}")
        wire.read(1777)
    os.kill(children(server.process.pid)[whose], signal.SIGKILL)
    cut.shut()
    rest = connect(0)
    rest.resume(f"cut-{name}", events_in(cut.data)[-1][0])
    for pieces in ([plain.read()], [resumable.read()], [cut.data, rest.read()]):
        assert shown(*pieces)[0] == whole[0]


def test_the_end_of_the_server_waits_for_no_reader_to_come_back() -> None:
    with serving("--shutdown-timeout", "1", **PACED) as server, ExitStack() as stack:
        running, ended = Wire(stack, server), Wire(stack, server)
        running.start({**CHAT, "max_tokens": 2000}, "running")
        running.read(500)
        ended.start({**CHAT, "max_tokens": 2}, "ended")
        ended.read()
        running.shut()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(5.0)) == 0
