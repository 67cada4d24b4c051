"""The client of `bench serve` against a server that answers in every way: cut anywhere, wrong, or not at all."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.deadlines import scaled
from vllm_lite.errors import ConfigError
from vllm_lite.tools.bench import serve
from vllm_lite.tools.bench.serve_client import Endpoint, Outcome
from vllm_lite.tools.bench.serve_datasets import DatasetOptions, LoadItem
from vllm_lite.tools.bench.serve_http import MAX_EVENT_BYTES, HttpClient, HttpError, SseReader

DEADLINE_S = scaled(30.0)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ASKED = LoadItem([5, 6, 7], 3, 4)

Script = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def chunk(text: str, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    event = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    """A piece of a chunked body; of b"" its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM = chunk("Once ") + chunk("upon a", "length") + usage(3, 4) + DONE


class Stub:
    """A server on a free port that reads requests and lets `script` answer."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.tls = tls
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.num_connections = 0
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.url = f"http{'s' * bool(self.tls)}://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = {line.split(": ")[0].lower(): line.split(": ")[1] for line in head.split("\r\n")[1:-2]}
                data = await reader.readexactly(int(fields.get("content-length", "0")))
                body = json.loads(data) if data else {}
                self.requests.append((head, body))
                await self.script(body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.ended.put_nowait(None)


def answering(*pieces: bytes, end: bytes = b"", close: bool = False) -> Script:
    async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for piece in (*pieces, end):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return script


async def ask(
    script: Script, *, path: str = "/v1/completions", timeout_s: float = DEADLINE_S, **client: Any
) -> Outcome:
    async def talk() -> Outcome:
        async with Stub(script) as stub:
            http = HttpClient(stub.url, **{"headers": {}, **client})
            outcome = await Endpoint(http, path, {"model": "m"}, timeout_s=timeout_s).send(ASKED)
            http.close()
            return outcome

    return await asyncio.wait_for(talk(), DEADLINE_S)


# ---- events


EVENTS = [b"one", b"two\nlines", b"", b"three: colons", "zażółć".encode()]


def written(newline: bytes) -> bytes:
    lines = [b": ping", b"", b"event: chunk", b"data: one", b"", b"data: two", b"data: lines", b"id: 1", b"", b"data:"]
    lines += [b"", b": ping", b"data:three: colons", b"retry: 5", b"", b"", b"data: " + EVENTS[-1], b"", b""]
    return newline.join(lines)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_events_byte_by_byte(newline: bytes) -> None:
    data, reader = written(newline), SseReader()
    assert SseReader().feed(data) == EVENTS
    assert [event for place in range(len(data)) for event in reader.feed(data[place : place + 1])] == EVENTS


@example([47, 47], b"\r\n")
@given(st.lists(st.integers(0, 200)), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_cut_anywhere(cuts: list[int], newline: bytes) -> None:
    data, reader = written(newline), SseReader()
    places = [0, *sorted(cuts), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(places)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_is_returned_with_its_last_byte() -> None:
    reader = SseReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\n") == [b"a"]


@pytest.mark.parametrize("piece", [b"x" * 70_000, b"data: " + b"x" * 70_000 + b"\n"])
def test_events_are_bounded(piece: bytes) -> None:
    reader = SseReader()
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        assert reader.feed(piece) == []
    with pytest.raises(HttpError, match="longer than"):
        reader.feed(piece)


# ---- answers that are right


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_a_stream_in_pieces_of_any_size(size: int, newline: bytes) -> None:
    """Cut within HTTP's chunks, within lines and within characters, with comments in between."""
    data = (b": ping\n\n" + STREAM).replace(b"\n", newline)
    body = b"".join(chunked(data[place : place + 11]) for place in range(0, len(data), 11)) + chunked(b"")
    whole = HEAD + body
    outcome = await ask(answering(*(whole[place : place + size] for place in range(0, len(whole), size))))
    assert outcome.error == ""
    assert outcome.text == "Once upon a"
    assert (outcome.input_len, outcome.output_len, len(outcome.chunks_s)) == (3, 4, 2)
    assert 0 < outcome.ttft_s <= outcome.latency_s


async def test_events_of_one_read_have_one_time() -> None:
    outcome = await ask(answering(HEAD + chunked(STREAM) + chunked(b"")))
    assert outcome.itls_s == [0.0]
    assert outcome.ttft_s == outcome.latency_s


async def test_an_answer_that_the_closed_connection_ends() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    assert (await ask(answering(head, STREAM, close=True))).error == ""
    assert "connection ended" in (await ask(answering(head, chunk("a"), close=True))).error


async def test_without_usage_chunks_are_counted_by_the_run() -> None:
    outcome = await ask(answering(HEAD, chunked(chunk("a") + chunk("b") + DONE), chunked(b"")))
    assert (outcome.error, outcome.output_len, outcome.input_len) == ("", 0, 3)
    serve.count_missing_usage([outcome], None)
    assert outcome.output_len == 2


def delta(**fields: Any) -> bytes:
    finish = fields.pop("finish_reason", None)
    return b"data: " + json.dumps({"choices": [{"delta": fields, "finish_reason": finish}]}).encode() + b"\n\n"


async def test_a_chat() -> None:
    """The role alone is not a token; reasoning is."""
    events = delta(role="assistant", content=""), delta(reasoning="Hm."), delta(content=" Yes"), delta(content=None)
    stream = b"".join(events) + delta(finish_reason="stop") + DONE
    asked: list[dict[str, Any]] = []

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(body)
        writer.write(HEAD + chunked(stream) + chunked(b""))

    outcome = await ask(script, path="/v1/chat/completions")
    assert (outcome.error, outcome.text, len(outcome.chunks_s)) == ("", "Hm. Yes", 4)
    assert asked[0]["messages"] == [{"role": "user", "content": [5, 6, 7]}]
    assert asked[0]["max_completion_tokens"] == 4
    assert asked[0]["stream_options"] == {"include_usage": True}


# ---- answers that are not


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (answering(HEAD, chunked(chunk("a") + b'data: {"error": {"message": "out of luck"}}\n\n')), "out of luck"),
        (answering(HEAD, chunked(b"data: {no json}\n\n")), "not a chunk"),
        (answering(HEAD, chunked(b'data: {"choices": 5}\n\n')), "not a chunk"),
        (answering(HEAD, chunked(chunk("a")), chunked(b"")), r"without \[DONE\]"),
        (answering(HEAD, chunked(DONE), chunked(b"")), "no token"),
        (answering(HEAD, chunked(chunk("a")), close=True), "connection ended"),
        (answering(HEAD, chunked(chunk("a"))[:-9], close=True), "connection ended"),
        (answering(close=True), "connection ended"),
        (answering(b"hello\r\n\r\n"), "not HTTP"),
        (answering(HEAD, b"zz\r\n"), "not HTTP"),
        (answering(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"choices":[]'), r"without \[DONE\]"),
        (answering(b"HTTP/1.1 429 Too Many\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nfull"), "HTTP 429: full"),
        (answering(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"), "HTTP 500"),
        (answering(HEAD, chunked(b"data: " + b"x" * MAX_EVENT_BYTES)), "longer than"),
    ],
)
async def test_failures_have_an_error_text(script: Script, text: str) -> None:
    outcome = await ask(script)
    assert text.replace("\\", "") in outcome.error
    assert len(outcome.error) <= 500


async def test_a_server_that_never_answers() -> None:
    assert (await ask(answering(), timeout_s=0.05)).error == "no end after 0.05 s"
    assert (await ask(answering(HEAD, chunked(chunk("a"))), timeout_s=0.05)).error == "no end after 0.05 s"


async def test_a_failed_connection_is_closed() -> None:
    async def talk() -> str:
        async with Stub(answering(HEAD, chunked(chunk("a") + b"data: no\n\n"))) as stub:
            http = HttpClient(stub.url, {})
            outcome = await Endpoint(http, "/v1/completions", {}, timeout_s=DEADLINE_S).send(ASKED)
            await stub.ended.get()
            return outcome.error

    assert "not a chunk" in await asyncio.wait_for(talk(), DEADLINE_S)


async def test_a_connection_that_ends_as_the_next_request_is_sent() -> None:
    """An idle connection's end and a request may pass each other: the request is sent again, on a new connection."""

    async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(writer)
        if len(seen) == 2:
            writer.close()
        else:
            writer.write(HEAD + chunked(STREAM) + chunked(b""))

    async def talk() -> tuple[list[str], int]:
        async with Stub(script) as stub:
            http = HttpClient(stub.url, {})
            ask_once = Endpoint(http, "/v1/completions", {}, timeout_s=DEADLINE_S).send
            errors = [(await ask_once(ASKED)).error for _ in range(2)]
            http.close()
            return errors, stub.num_connections

    seen: list[asyncio.StreamWriter] = []
    assert await asyncio.wait_for(talk(), DEADLINE_S) == (["", ""], 2)
    assert len(seen) == 3


async def test_a_new_connection_that_ends_is_an_error() -> None:
    assert "ended before" in (await ask(answering(close=True))).error


@pytest.mark.parametrize("url", ["http://[::1", "ftp://host", "http://"])
def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="a server's address must look like"):
        HttpClient(url, {})


async def test_no_server_listens() -> None:
    async def talk() -> str:
        async with Stub(answering()) as stub:
            url = stub.url
        http = HttpClient(url, {})
        return (await Endpoint(http, "/v1/completions", {}, timeout_s=DEADLINE_S).send(ASKED)).error

    assert "cannot be reached" in await asyncio.wait_for(talk(), DEADLINE_S)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="its certificate is made with openssl")
async def test_https(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    name = ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    subprocess.run([*made, *name], check=True, capture_output=True, timeout=scaled(60))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def talk() -> list[str]:
        async with Stub(answering(HEAD, chunked(STREAM), chunked(b"")), tls) as stub:
            errors = []
            for check in (False, True):
                http = HttpClient(stub.url, {}, check_tls=check)
                errors.append((await Endpoint(http, "/v1/completions", {}, timeout_s=DEADLINE_S).send(ASKED)).error)
                http.close()
            return errors

    unchecked, checked = await asyncio.wait_for(talk(), DEADLINE_S)
    assert unchecked == ""
    assert "cannot be reached" in checked
    assert "certificate" in checked


# ---- runs


async def run(script: Script, **options: Any) -> tuple[serve.ServeRun, Stub]:
    async def talk() -> tuple[serve.ServeRun, Stub]:
        async with Stub(script) as stub:
            data = DatasetOptions(num_prompts=options.pop("num_prompts", 12), random_input_len=8, random_output_len=4)
            given = serve.ServeOptions(**{"dataset": data, "base_url": stub.url, "model": "m", **options})
            return await serve._run(given), stub

    return await asyncio.wait_for(talk(), DEADLINE_S)


async def test_connections_are_kept_and_bounded() -> None:
    running = most = 0

    async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _pass in range(3):
            await asyncio.sleep(0)
        running -= 1
        writer.write(HEAD + chunked(STREAM) + chunked(b""))

    done, stub = await run(script, max_concurrency=3, num_warmups=5, headers={"Authorization": "Bearer k"})
    assert (done.result["completed"], done.result["failed"], len(stub.requests)) == (12, 0, 17)
    assert stub.num_connections == most == done.result["max_concurrent_requests"] == 3
    assert all("\r\nAuthorization: Bearer k\r\n" in head for head, _ in stub.requests)
    assert (done.result["total_input_tokens"], done.result["total_output_tokens"]) == (36, 48)


async def test_a_closed_connection_is_not_used_again() -> None:
    script = answering(HEAD.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), chunked(STREAM), chunked(b""))
    done, stub = await run(script, max_concurrency=1)
    assert (done.result["completed"], stub.num_connections) == (12, 12)


async def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    async def talk() -> tuple[list[str], int]:
        async with Stub(answering(HEAD, chunked(STREAM) + chunked(b""), close=True)) as stub:
            http = HttpClient(stub.url, {})
            api = Endpoint(http, "/v1/completions", {}, timeout_s=DEADLINE_S)
            errors = []
            for _ in range(2):
                errors.append((await api.send(ASKED)).error)
                await stub.ended.get()
                for _pass in range(100):  # passes of the loop, in which the end arrives
                    await asyncio.sleep(0)
            return errors, stub.num_connections

    assert await asyncio.wait_for(talk(), DEADLINE_S) == (["", ""], 2)


async def test_an_error_does_not_cost_the_connection() -> None:
    done, stub = await run(answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"), max_concurrency=2)
    assert (done.result["failed"], stub.num_connections) == (12, 2)


async def test_some_fail_and_the_others_count() -> None:
    calls = 0

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\nno")
        elif calls % 3 == 1:
            writer.write(HEAD + chunked(chunk("a")))
            writer.close()
        else:
            writer.write(HEAD + chunked(STREAM) + chunked(b""))

    done, stub = await run(
        script, max_concurrency=2, request_rate=2000.0, sampling={"ignore_eos": True}, percentiles=(50.0,)
    )
    result = done.result
    assert (result["completed"], result["failed"], len(done.served)) == (4, 8, 4)
    assert {error[:8] for error in result["errors"]} == {"", "HTTP 429", "the conn"}
    assert (result["num_prompts"], result["request_rate"], result["max_concurrency"]) == (12, 2000.0, 2)
    assert result["total_output_tokens"] == 16
    assert result["p50_ttft_ms"] > 0
    assert stub.requests[0][1]["ignore_eos"] is True
    assert len(stub.requests[0][1]["prompt"]) == 8


async def test_the_model_is_the_servers_first() -> None:
    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body:
            writer.write(HEAD + chunked(STREAM) + chunked(b""))
        else:
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\n{"data": [{"id": "theirs"}]}')

    done, stub = await run(script, model=None)
    assert stub.requests[0][0].startswith("GET /v1/models HTTP/1.1\r\n")
    assert {body["model"] for _, body in stub.requests[1:]} == {done.result["model_id"]} == {"theirs"}
    with pytest.raises(HttpError, match="give --model"):
        await run(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), model=None)


def test_addresses() -> None:
    assert HttpClient("http://h/v1/", {}).url("/v1/models") == "/v1/models"
    assert HttpClient("https://h:1/proxy/v1", {}).url("/v1/models") == "/proxy/v1/models"
    assert HttpClient("http://h/proxy", {}).url("/generate") == "/proxy/generate"
    assert b"Host: h:1\r\n" in HttpClient("http://user@h:1", {}).headers
    for url in ("ftp://h", "h:8000", "http://", "http://h:x"):
        with pytest.raises(ConfigError):
            HttpClient(url, {})


def test_keys_are_sent_as_the_bytes_of_the_environment() -> None:
    """As `chat` sends them, and as the server compares them."""
    key = os.fsdecode("zażółć ✓".encode() + b"\xff")
    headers = HttpClient("http://h", {"Authorization": f"Bearer {key}"}).headers
    assert b"Authorization: Bearer " + os.fsencode(key) + b"\r\n" in headers


@pytest.mark.parametrize(
    ("seconds", "rate", "expected"),
    [
        ((0.001, 0.0), 1e9, 12),  # one after the other they would take less than the second
        ((1.0, 0.4), 1e9, 12),
        ((1.0, 0.8), 1e9, 10),
        ((9.0, 9.0), 1e9, 8),
        ((0.001, 0.0), 9.0, 9),  # requests that come slowly take as long as they come
    ],
)
async def test_a_slow_server_gets_fewer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: tuple[float, float],
    rate: float,
    expected: int,
) -> None:
    took, sent = iter(seconds), []

    async def drive(_: Any, requests: Any, *__: Any) -> tuple[list[Outcome], float]:
        sent.append(requests)
        return [Outcome(1) for _ in requests], max(next(took), 1e-6)

    monkeypatch.setattr(serve, "drive", drive)
    requests: Any = list(range(12))
    assert await serve.fitting(None, requests, rate, 1.0) == expected  # type: ignore[arg-type]
    assert sent[0] == [11]
    assert (f"{expected} are sent" in capsys.readouterr().err) == (expected < 12)


async def test_a_server_that_fails_is_not_measured_first() -> None:
    done, stub = await run(answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"), fit_s=1e-9)
    assert (done.result["failed"], len(stub.requests)) == (12, 13)
