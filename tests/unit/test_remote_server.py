"""The client of a server: addresses, streams and errors, over httpx's own fake of a connection."""

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from vllm_lite.errors import ConfigError, RemoteError
from vllm_lite.tools.batch.batch_run import Server
from vllm_lite.tools.chat import remote_server
from vllm_lite.tools.chat.remote_server import Address, AnswerPiece, RemoteServer, client_settings, lines_of, pieces
from vllm_lite.tools.top.watched import follow

DONE = "data: [DONE]"


def remote(handler: Callable[[httpx.Request], httpx.Response], **settings: object) -> RemoteServer:
    made = RemoteServer("http://server:1", "secret", **settings)  # type: ignore[arg-type]
    made._http = httpx.Client(transport=httpx.MockTransport(handler), **client_settings(made.address, made.api_key))
    return made


@pytest.mark.parametrize(
    ("url", "base", "uds", "is_local"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000", None, True),
        ("http://localhost:8000/v1/", "http://localhost:8000", None, True),
        ("10.0.0.1:80", "http://10.0.0.1:80", None, False),
        ("https://host/some/path/v1", "https://host/some/path", None, False),
        ("http://[::1]:8000", "http://[::1]:8000", None, True),
        ("unix:/run/it", "http://localhost", "/run/it", True),
    ],
)
def test_addresses(url: str, base: str, uds: str | None, is_local: bool) -> None:
    address = Address.parse(url)
    assert (address.base, address.uds, address.is_local) == (base, uds, is_local)
    assert client_settings(address, None)["trust_env"] is not is_local


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "http://host:port", "http://host:99999", "http://[::1"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Address.parse(url)


def test_certificates_are_checked() -> None:
    context = client_settings(Address.parse("https://host"), None)["verify"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.get_ca_certs()


def test_pieces_of_both_kinds_of_stream() -> None:
    lines = [
        ": ping",
        "",
        'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}',
        'data: {"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}',
        'data: {"choices":[{"index":0,"delta":{"content":"ä"},"finish_reason":"stop"}]}',
        'data:{"choices":[{"index":0,"text":"b","finish_reason":null}]}',
        'data: {"choices":[],"usage":{"prompt_tokens":1}}',
        DONE,
        "data: never read",
    ]
    assert list(pieces(lines)) == [
        AnswerPiece(),
        AnswerPiece(thought="hm"),
        AnswerPiece("ä", finish_reason="stop"),
        AnswerPiece("b"),
        AnswerPiece(usage={"prompt_tokens": 1}),
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['data: {"choices":[{"text":"a"}]}'], "went away"),
        ([], "went away"),
        (['data: {"error":{"message":"the engine died"}}', DONE], "the engine died"),
        (["data: {oops", DONE], "not a part of an answer"),
        (["data: []", DONE], "not a part of an answer"),
        (['data: {"choices":"abc"}', DONE], "not a part of an answer"),
    ],
)
def test_streams_that_break(lines: list[str], words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        list(pieces(lines))


def test_unicode_line_separators_end_no_line() -> None:
    """Not at U+2028 and others, which JSON has in strings as they are."""
    said = "before\u2028after\x85\x1c"
    chunk = json.dumps({"choices": [{"delta": {"content": said}}]}, ensure_ascii=False)
    body = f"data: {chunk}\r\n\r\ndata: [DONE]"

    def parts() -> Iterator[bytes]:
        yield from (bytes([byte]) for byte in body.encode())

    assert "".join(piece.text for piece in pieces(lines_of(httpx.Response(200, content=parts())))) == said
    server = remote(lambda _: httpx.Response(200, content=body.encode()), model="m")
    assert "".join(piece.text for piece in server.chat([], {})) == said


def test_bodies_of_requests() -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        bodies.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, text=f"{DONE}\n\n")

    with remote(handler) as server:
        assert list(server.chat([{"role": "user", "content": "a"}], {"temperature": 0})) == []
        assert list(server.complete("b", {})) == []
    with remote(handler, model="mine") as server:
        assert list(server.complete("c", {})) == []
    assert [path for path, _ in bodies] == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert [body["model"] for _, body in bodies] == ["first", "first", "mine"]
    assert bodies[0][1]["temperature"] == 0
    assert bodies[0][1]["messages"] == [{"role": "user", "content": "a"}]
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for _, body in bodies)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(401, json={"error": {"message": "a valid API key is needed"}}), ["--api-key", "http://server"]),
        (httpx.Response(400, json={"error": {"message": "too hot"}}), ["too hot", "400"]),
        (httpx.Response(404, json={"detail": "Not Found"}), ["Not Found", "404"]),
        (httpx.Response(502, text="<html>Bad Gateway"), ["Bad Gateway", "502"]),
        (httpx.Response(500), ["500"]),
        (httpx.ConnectError("refused"), ["vllm-lite serve", "--url", "http://server:1"]),
        (httpx.ReadTimeout("slow"), ["http://server:1"]),
        (httpx.RemoteProtocolError("peer closed"), ["went away"]),
    ],
)
@pytest.mark.parametrize("model", ["mine", None])
def test_failures_are_sentences(answer: httpx.Response | Exception, words: list[str], model: str | None) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with remote(handler, model=model) as server, pytest.raises(RemoteError) as caught:
        list(server.complete("a", {}))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "secret" not in str(caught.value)


def test_the_end_of_its_own_server_has_a_reason() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("")

    why = "worker 0 was killed by SIGKILL"
    with remote(handler, model="mine", why=lambda: why) as server, pytest.raises(RemoteError, match=why):
        list(server.complete("a", {}))


@pytest.mark.parametrize("body", ["{}", "[]", '{"data": []}', "no json", '{"data": [{}]}'])
def test_a_server_without_models(body: str) -> None:
    with remote(lambda _: httpx.Response(200, text=body)) as server, pytest.raises(RemoteError, match="names no model"):
        server.model  # noqa: B018


def test_closing_a_stream_closes_its_connection() -> None:
    closed = []

    class Body(httpx.SyncByteStream):
        def __iter__(self):
            while True:
                yield b'data: {"choices":[{"text":"a"}]}\n\n'

        def close(self) -> None:
            closed.append(True)

    with remote(lambda _: httpx.Response(200, stream=Body()), model="mine") as server:
        with closing(server.complete("a", {})) as stream:
            assert next(stream).text == "a"
        assert closed


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LITE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert remote_server.key_from_environment() is None
    monkeypatch.setenv("OPENAI_API_KEY", "a")
    assert remote_server.key_from_environment() == "a"
    monkeypatch.setenv("VLLM_LITE_API_KEY", "b")
    assert remote_server.key_from_environment() == "b"


@pytest.mark.parametrize(
    ("shown", "is_mild"),
    [
        ({"modelfile": "# served by vllm_lite\nFROM m\n", "parameters": ""}, True),
        ({"modelfile": "# served by vllm_lite\nFROM m\n", "parameters": "max_tokens 50\nrepetition_penalty 1.1"}, True),
        ({"modelfile": "# served by vllm_lite\nFROM m\n", "parameters": "max_tokens 50\ntop_k 20"}, False),
        ({"modelfile": "# served by vllm_lite\nFROM m\n", "parameters": "temperature 1.0"}, False),
        ({"modelfile": "FROM m\n", "parameters": ""}, False),
        ({"error": "not found"}, False),
        (["odd"], False),
    ],
)
def test_mild_defaults_are_for_models_that_say_nothing(shown: object, is_mild: bool) -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/show":
            assert json.loads(request.content) == {"model": "m"}
            return httpx.Response(200, json=shown)
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text=DONE)

    server = remote(answer, model="m")
    assert server.take_mild_defaults() == (remote_server.MILD if is_mild else {})
    list(server.chat([], {"top_p": 0.5}))
    given = {name: value for name, value in bodies[0].items() if name in remote_server.MILD}
    assert given == ({**remote_server.MILD, "top_p": 0.5} if is_mild else {"top_p": 0.5})


def test_a_server_that_does_not_answer_has_its_own_defaults() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone", request=request)

    assert remote(fail, model="m").take_mild_defaults() == {}
    assert remote(lambda _: httpx.Response(404, text="<html>"), model="m").take_mild_defaults() == {}


@pytest.mark.parametrize(
    ("key", "sent"), [("key", b"key"), ("schl\u00fcssel", b"schl\xc3\xbcssel"), ("\udcff", b"\xff")]
)
def test_a_key_is_sent_in_utf_8(key: str, sent: bytes) -> None:
    """The server reads its own keys as UTF-8, too."""
    headers = httpx.Headers(client_settings(Address.parse("http://server"), key)["headers"])
    assert headers.raw == [(b"Authorization", b"Bearer " + sent)]


def test_a_text_of_the_command_line_that_is_no_utf_8() -> None:
    with pytest.raises(RemoteError, match="not valid UTF-8 at character"):
        list(remote(lambda _: httpx.Response(200), model="m").complete("caf\udce9", {}))


def test_a_socket_of_this_machine_needs_no_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SSL_CERT_FILE often names a file of an environment that was removed."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    monkeypatch.setattr(httpx.Client, "stream", lambda *_, **__: closing(SimpleNamespace(status_code=200, close=list)))
    monkeypatch.setattr("vllm_lite.tools.top.watched.lines_of", lambda _: ())
    url = f"unix:{tmp_path}/socket"
    Server(Address.parse(url), None, 1.0)
    with RemoteServer(url), pytest.raises(RemoteError, match="the server has ended"):
        list(follow(Address.parse(url), None))
