"""Duties of an HTTP/1.1 server with a request's head and frame that uvicorn leaves undone.

Offers    A request may offer another protocol (`Upgrade: h2c` of Java's HttpClient, `websocket`). A server that ignores
          the offer answers as if it were not there; the parser would take all behind the head for that protocol, and
          lose the body. So the head is parsed again without it.
HTTP/1.0  knows no chunks: an answer of unknown length ends with its connection.
Targets   may be whole URLs, whose host then stands for that of the Host header.
"""

from collections.abc import Sequence

from httptools import HttpRequestParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_OFFER = b"upgrade"
_LENGTH = b"content-length"
_HOST = b"host"

Headers = Sequence[tuple[bytes, bytes]]


def new_parser(protocol: object) -> HttpRequestParser:
    """Make a parser as uvicorn does: what comes behind a request that is the last one is no error."""
    parser = HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def head_without_offer(parser: HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """Write the head that `parser` has read once more, without what it offers. That is safe: no header that it lets
    pass holds the end of a line."""
    first = b"%b %b HTTP/%b\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    return first + b"".join(b"%b: %b\r\n" % header for header in headers if header[0] != _OFFER) + b"\r\n"


def relative(url: bytes, headers: Headers) -> tuple[bytes, Headers]:
    """Return the target from its path on, and the headers with the host of `url`, if it is a whole one."""
    scheme, mark, rest = url.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return url, headers
    end = min((place for place in map(rest.find, (b"/", b"?", b"#")) if place >= 0), default=len(rest))
    target = rest[end:] if rest[end:].startswith(b"/") else b"/" + rest[end:]
    return target, [*(header for header in headers if header[0] != _HOST), (_HOST, rest[:end].rpartition(b"@")[2])]


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap `app` for a client that knows no chunks: a body whose length no header gives is written as it is. The end of
    the connection, which uvicorn closes behind every answer to such a client, is its end."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == _LENGTH for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts what is left to come
            await send(message)

        await app(scope, receive, send_plainly)

    return answered
