"""HTTP/1.1 framing that uvicorn lacks.

Offers    A request may offer another protocol (`Upgrade: h2c` of Java's HttpClient, `websocket`). A server that ignores
          the offer has to answer as if it were absent, but the parser takes all bytes after the head for that protocol,
          and loses the body. So the head is parsed again without the offer.
HTTP/1.0  has no chunked encoding: an answer of unknown length ends with its connection.
Targets   can be whole URLs, whose host then replaces that of the Host header.
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
    """Make a parser as uvicorn does: bytes after the last request of a connection are no error."""
    parser = HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def head_without_offer(parser: HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """Rebuild the head that `parser` has read, without its offer. This is safe: the parser accepts no header with a
    line end."""
    first = b"%b %b HTTP/%b\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    return first + b"".join(b"%b: %b\r\n" % header for header in headers if header[0] != _OFFER) + b"\r\n"


def relative(url: bytes, headers: Headers) -> tuple[bytes, Headers]:
    """Return the target from its path on, and the headers; for a target that is a whole URL, with its host."""
    scheme, mark, rest = url.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return url, headers
    end = min((place for place in map(rest.find, (b"/", b"?", b"#")) if place >= 0), default=len(rest))
    target = rest[end:] if rest[end:].startswith(b"/") else b"/" + rest[end:]
    return target, [*(header for header in headers if header[0] != _HOST), (_HOST, rest[:end].rpartition(b"@")[2])]


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap `app` for an HTTP/1.0 client: a body without a content length is written unchunked. It ends with the
    connection, which uvicorn closes after every answer to such a client."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == _LENGTH for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts the bytes that are left
            await send(message)

        await app(scope, receive, send_plainly)

    return answered
