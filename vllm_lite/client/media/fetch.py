"""Fetches images from the web: only from domains that the operator names, at public addresses, within limits.

A domain is resolved once, and the connection goes to the checked address, so a later change of its name has no effect.
A redirect is an error.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self
from urllib.parse import SplitResult, urlsplit

from vllm_lite.client.media.sources import MAX_FILE_BYTES
from vllm_lite.errors import RequestError

FETCH_S = 20.0
"""Time limit for one image, from resolving its domain to the last byte."""
CHUNK_BYTES = 256 * 1024
MAX_URL_CHARS = 8192

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052

IsPublic = Callable[[str], bool]


def is_public(address: str) -> bool:
    """Whether an IP address is public: not private, loopback or multicast, nor an IPv6 address that a gateway maps to
    such an IPv4 address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = _inner(found) if isinstance(found, ipaddress.IPv6Address) else None
    reached = inner or found
    return reached.is_global and not reached.is_multicast


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address embedded in an IPv6 address: mapped, 6to4, Teredo or NAT64."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


class Fetcher:
    """Fetches files from allowed domains. Thread-safe."""

    def __init__(self, domains: Sequence[str], is_public: IsPublic = is_public) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._is_public = is_public

    def __call__(self, url: str, where: str) -> bytes:
        """Fetch the file at an http or https URL. Raises RequestError with one sentence, which shows nothing of the
        server's answer except its status."""
        deadline_s = time.monotonic() + FETCH_S
        parts = self._checked(url, where)
        try:
            return self._body(parts, where, deadline_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            kind = type(error).__name__
            raise RequestError(f"{where} has an image at {_shown(parts)}, which cannot be fetched: {kind}") from error

    def _checked(self, url: str, where: str) -> SplitResult:
        if len(url) > MAX_URL_CHARS:
            raise RequestError(f"{where} has an image at a URL of {len(url)} characters; at most {MAX_URL_CHARS}")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise RequestError(f"{where} has an image at {url[:64]!r}; a URL has visible characters of ASCII alone")
        try:
            parts = urlsplit(url)
            port = parts.port  # a number, or nothing, or an error
        except ValueError:
            raise RequestError(f"{where} has an image at {url[:64]!r}, which is not a URL") from None
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or port == 0:
            raise RequestError(f"{where} has an image at {url[:64]!r}; give a data:, http or https URL without a user")
        if host not in self._domains:
            known = ", ".join(sorted(self._domains))
            raise RequestError(f"{where} has an image at {host[:64]!r}; images are fetched from {known} alone")
        return parts

    def _body(self, parts: SplitResult, where: str, deadline_s: float) -> bytes:
        with self._connected(parts, where, deadline_s) as connection:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "vllm_lite"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RequestError(f"{where} has an image at {_shown(parts)}, which answers {answer.status}, not 200")
            received = self._read(answer, where)
            _left(deadline_s)  # else what was received may end where the time did
            return received

    def _read(self, answer: http.client.HTTPResponse, where: str) -> bytes:
        received = bytearray()
        while chunk := answer.read1(CHUNK_BYTES):
            received += chunk
            if len(received) > MAX_FILE_BYTES:
                raise RequestError(f"{where} has an image of more than {MAX_FILE_BYTES} bytes")
        if answer.length:  # the connection has ended early
            raise http.client.IncompleteRead(b"", answer.length)
        return bytes(received)

    def _connected(self, parts: SplitResult, where: str, deadline_s: float) -> "_Pinned":
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not found or not all(self._is_public(str(each[4][0])) for each in found):
            raise RequestError(f"{where} has an image at {host!r}, which is not at a public address")
        return _Pinned(host, port, str(found[0][4][0]), deadline_s, is_encrypted=parts.scheme == "https")


class _Pinned(http.client.HTTPConnection):
    """A connection to a checked address of `host`. It is cut at the deadline, even if bytes still arrive slowly."""

    def __init__(self, host: str, port: int, address: str, deadline_s: float, *, is_encrypted: bool) -> None:
        if is_encrypted:
            self.default_port = 443
        super().__init__(host, port)
        self._address = address
        self._is_encrypted = is_encrypted
        self._deadline_s = deadline_s
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.close()

    def connect(self) -> None:
        wire = socket.create_connection((self._address, self.port), _left(self._deadline_s))
        encrypted = None
        if self._is_encrypted:
            context = ssl.create_default_context()
            wire = encrypted = context.wrap_socket(wire, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock = wire
        self._timer = threading.Timer(_left(self._deadline_s), _break, (wire,))
        self._timer.daemon = True
        self._timer.start()
        if encrypted is not None:
            encrypted.do_handshake()


def _break(wire: socket.socket) -> None:
    """End all waits for a connection, which may have been closed."""
    with suppress(OSError):
        socket.socket.shutdown(wire, socket.SHUT_RDWR)  # TLS's own would take its state from a reader


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _shown(parts: SplitResult) -> str:
    return repr(f"{parts.scheme}://{parts.netloc}"[:64])
