"""An OpenAI-compatible server: prompts in, streams of pieces out. Every failure becomes one sentence."""

import json
import os
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx

from vllm_lite.errors import ConfigError, RemoteError

DEFAULT_URL = "http://localhost:8000"
CONNECT_S = 10.0
SILENCE_S = 600.0
"""Timeout without any data from the server; this package's server sends something every 15 s."""
MILD = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Sampling params if neither the model nor the user sets them. Servers then use a temperature of 1, with which small
models answer nonsense to questions they could answer."""
SERVED_BY = "# served by vllm_lite"
"""Marks the answer of this package's server to /api/show."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


class AnswerPiece(NamedTuple):
    """A new piece of an answer. `usage` is sent once, at the end."""

    text: str = ""
    thought: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


Pieces = Generator[AnswerPiece, None, None]


class Address(NamedTuple):
    """The address of a server. `base` is without /v1; `uds` is the path of its Unix socket, if it has one."""

    base: str
    uds: str | None
    shown: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse http://HOST:PORT, with or without /v1, or unix:PATH. Raises ConfigError."""
        if url.startswith("unix:"):
            return cls("http://localhost", url.removeprefix("unix:"), url)
        base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise ConfigError(f"--url must look like http://HOST:PORT or unix:PATH, got {url!r}")
        return cls(base, None, base)

    @property
    def is_local(self) -> bool:
        return self.uds is not None or urlsplit(self.base).hostname in _LOCAL


def no_tls() -> ssl.SSLContext:
    """A bare context, for a connection without TLS: it trusts no certificate, and reads no file of them, which
    SSL_CERT_FILE may name in vain."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def client_settings(address: Address, api_key: str | None, silence_s: float = SILENCE_S) -> dict[str, Any]:
    """The arguments common to httpx.Client and AsyncClient, except the transport."""
    secure = address.base.startswith("https:")
    return {
        "base_url": address.base,
        "timeout": httpx.Timeout(silence_s, connect=CONNECT_S),
        "verify": ssl.create_default_context() if secure else no_tls(),
        "trust_env": not address.is_local,  # no proxy for this machine
        "headers": {"Authorization": f"Bearer {api_key}".encode(errors="surrogateescape")} if api_key else {},
    }


def open_client(address: Address, api_key: str | None, silence_s: float = SILENCE_S) -> httpx.Client:
    transport = None if address.uds is None else httpx.HTTPTransport(uds=address.uds, verify=no_tls())
    return httpx.Client(transport=transport, **client_settings(address, api_key, silence_s))


def key_from_environment() -> str | None:
    return os.environ.get("VLLM_LITE_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


class RemoteServer:
    """A server, used by one thread. Every method that sends a request raises RemoteError."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        model: str | None = None,
        why: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`model` defaults to the server's first; `why()` returns the reason why the server cannot be reached, if
        known."""
        self.address = Address.parse(url)
        self.api_key = api_key
        self.why = why
        self.defaults: Mapping[str, Any] = {}
        """Default sampling params of requests; where it has none, the server's apply."""
        self._model = model
        self._http = open_client(self.address, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The name of the model. The first call asks the server if none was given."""
        if self._model is None:
            with self._failures():
                response = self._http.get("/v1/models")
                check(self.address, response.status_code, response.content)
                try:
                    self._model = str(response.json()["data"][0]["id"])
                except (ValueError, LookupError, TypeError) as error:
                    text = f"{self.address.shown} names no model; is it an OpenAI-compatible server?"
                    raise RemoteError(text) from error
        return self._model

    def take_mild_defaults(self) -> Mapping[str, Any]:
        """Set `defaults` to MILD if the server is this package's and sets no sampling params for its model. Returns
        them."""
        with suppress(httpx.HTTPError, ValueError, AttributeError):
            said = self._http.post("/api/show", json={"model": self.model}).json()
            own = {line.partition(" ")[0] for line in said.get("parameters", "").splitlines()}
            if said.get("modelfile", "").startswith(SERVED_BY) and not own & {*MILD, "top_k"}:
                self.defaults = MILD
        return self.defaults

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Pieces:
        """Stream the answer to `messages`. Closing the iterator aborts it on the server."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **sampling})

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Pieces:
        """Stream the continuation of `prompt`. Closing the iterator aborts it on the server."""
        return self._stream("/v1/completions", {"prompt": prompt, **sampling})

    def _stream(self, path: str, body: Mapping[str, Any]) -> Pieces:
        whole = {
            "model": self.model,
            **self.defaults,
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._failures(), self._http.stream("POST", path, json=whole) as response:
            if response.status_code != httpx.codes.OK:
                check(self.address, response.status_code, response.read())
            yield from pieces(lines_of(response))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise lost(self.address, error, self.why()) from error
        except UnicodeEncodeError as error:  # from the command line
            raise RemoteError(f"the text is not valid UTF-8 at character {error.start} of the request") from error


def lines_of(response: httpx.Response) -> Iterator[str]:
    """Yield the lines of a stream. httpx would also split at characters like U+2028, which JSON may contain."""
    held = b""
    for piece in response.iter_bytes():
        *whole, held = (held + piece).split(b"\n")
        yield from (line.removesuffix(b"\r").decode(errors="replace") for line in whole)
    if held:
        yield held.decode(errors="replace")


def pieces(lines: Iterable[str]) -> Iterator[AnswerPiece]:
    """Parse the lines of a stream of server-sent events. Raises RemoteError for an error event, or if the stream ends
    early."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # a comment, or the empty line between events
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise RemoteError(f"the server broke off: {message_of(event)}")
            choices = event.get("choices") or [{}]
            said = choices[0].get("delta") or choices[0]
            text = said.get("content") or said.get("text") or ""
            thought = said.get("reasoning") or said.get("reasoning_content") or ""
            yield AnswerPiece(text, thought, choices[0].get("finish_reason"), event.get("usage"))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise RemoteError(f"the server sent data that is not a part of an answer: {data[:100]!r}") from error
    raise RemoteError("the server went away in the middle of its answer")


def check(address: Address, status: int, body: bytes) -> None:
    """Raises RemoteError unless `status` is 200."""
    if status == httpx.codes.OK:
        return
    try:
        message = message_of(json.loads(body))
    except ValueError:
        message = body[:200].decode(errors="replace").strip() or "it does not say why"
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise RemoteError(f"{address.shown} wants another API key; give --api-key, or set OPENAI_API_KEY ({message})")
    raise RemoteError(f"{message} (HTTP status {status})")


def message_of(body: Any) -> str:
    """The message of an error in OpenAI's format, or a similar one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    found = error.get("message", error) if isinstance(error, dict) else error
    return found if isinstance(found, str) else json.dumps(found)


def lost(address: Address, error: httpx.HTTPError, why: str | None) -> RemoteError:
    """Explain `error` in a sentence with advice."""
    if why is not None:
        return RemoteError(why)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
        what = str(error) if address.base.startswith("https:") else "no server answers"
        return RemoteError(
            f"{what} at {address.shown}; start one with `vllm-lite serve MODEL`, or say where it is with --url"
        )
    if isinstance(error, httpx.TimeoutException):
        return RemoteError(f"the server at {address.shown} says nothing any more")
    return RemoteError(f"the server at {address.shown} went away")
