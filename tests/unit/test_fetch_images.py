"""Images from the web: only from domains that are allowed, at addresses that are public, within limits."""

import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deadlines import scaled
from vllm_lite.client.media import fetch
from vllm_lite.client.media.fetch import Fetcher, is_public
from vllm_lite.errors import RequestError

FILE = bytes(range(256)) * 2000


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        if self.path == "/cut":
            self.send_header("Content-Length", str(2 * len(FILE)))
        self.end_headers()
        if self.path == "/slow":
            for _ in range(200):
                self.wfile.write(b"x")
                if self.server.stopped.wait(0.05):  # type: ignore[attr-defined]
                    return
        self.wfile.write(FILE)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.stopped = [], threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.stopped.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join(scaled(10.0))
    server.server_close()


def url(server: http.server.ThreadingHTTPServer, path: str = "/a.png", host: str = "localhost") -> str:
    return f"http://{host}:{server.server_address[1]}{path}"


def asked(server: http.server.ThreadingHTTPServer) -> list[str]:
    found: list[str] = server.asked  # type: ignore[attr-defined]
    return found


def test_a_file_of_an_allowed_domain(server: http.server.ThreadingHTTPServer) -> None:
    fetcher = Fetcher(["LocalHost."], is_public=lambda _: True)
    assert fetcher(url(server, "/a.png?size=2"), "here") == FILE
    assert asked(server) == ["/a.png?size=2"]


def test_an_address_that_is_not_public_is_never_contacted(server: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises(RequestError, match="here has an image at 'localhost', which is not at a public address"):
        Fetcher(["localhost"])(url(server), "here")
    assert not asked(server)


def test_one_private_address_among_others_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a name with two addresses would give access to the inner network whenever the first does not answer."""
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("contacted"))
    with pytest.raises(RequestError, match="not at a public address"):
        Fetcher(["example.org"])("http://example.org/a.png", "here")


def test_the_checked_address_is_the_one_that_is_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that leads elsewhere when it is asked for again is not asked for again."""
    answers = iter(["93.184.216.34", "127.0.0.1"])
    contacted = []

    def looked_up(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), 80))]

    def connected(address: tuple[str, int], *_: Any) -> socket.socket:
        contacted.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(socket, "create_connection", connected)
    with pytest.raises(RequestError, match="cannot be fetched: ConnectionRefusedError"):
        Fetcher(["example.org"])("http://example.org/a.png", "here")
    assert contacted == [("93.184.216.34", 80)]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("http://elsewhere.org/a.png", "has an image at 'elsewhere.org'; images are fetched from localhost alone"),
        ("http://localhost.elsewhere.org/", "images are fetched from localhost alone"),
        ("http://user:word@localhost/", "without a user"),
        ("http://localhost@elsewhere.org/", "without a user"),
        ("http://localhost:99999/", "is not a URL"),
        ("http://[::1/", "is not a URL"),
        ("http:///a.png", "without a user"),
        ("ftp://localhost/", "give a data:, http or https URL"),
        ("http://localhost/\r\nHost: inside", "has an image at"),
        ("http://localhost/" + "a" * 9000, "a URL of 9017 characters"),
    ],
)
def test_urls_that_are_refused(given: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        Fetcher(["localhost"], is_public=lambda _: pytest.fail("looked up"))(given, "here")


def test_redirects_errors_and_files_cut_off_are_refused(server: http.server.ThreadingHTTPServer) -> None:
    fetcher = Fetcher(["localhost"], is_public=lambda _: True)
    for path, problem in (("/moved", "answers 302"), ("/none", "answers 404"), ("/cut", "IncompleteRead")):
        with pytest.raises(RequestError, match=problem):
            fetcher(url(server, path), "here")
    assert asked(server) == ["/moved", "/none", "/cut"]


def test_sizes_and_times_are_bounded(server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher(["localhost"], is_public=lambda _: True)
    monkeypatch.setattr(fetch, "MAX_FILE_BYTES", len(FILE) - 1)
    with pytest.raises(RequestError, match=f"more than {len(FILE) - 1} bytes"):
        fetcher(url(server), "here")
    monkeypatch.setattr(fetch, "MAX_FILE_BYTES", len(FILE) * 2)
    monkeypatch.setattr(fetch, "FETCH_S", 0.5)
    with pytest.raises(RequestError, match="cannot be fetched"):  # a byte at a time, which no wait of a read ends
        fetcher(url(server, "/slow"), "here")
