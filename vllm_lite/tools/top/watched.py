"""Follows a server's /v1/live: what its engines have now, and what they did between two looks."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import httpx

from vllm_lite.errors import RemoteError
from vllm_lite.tools.chat.remote_server import Address, check, client_settings, lost

PATH = "/v1/live"
SILENCE_S = 30.0
"""A server says something twice a second."""
NUM_KEPT = 120
"""Looks that are kept for speeds: a minute's."""


class EngineLook:
    """An engine as the events say it is. `head` has what is sent whole each time, `requests` are merged."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.speeds: deque[float] = deque(maxlen=NUM_KEPT)
        """Tokens generated per second, look by look."""
        self._before: tuple[float, dict[str, Any]] | None = None
        self._last: tuple[float, dict[str, Any]] | None = None

    def take(self, said: dict[str, Any], now_s: float) -> None:
        self.head = {name: value for name, value in said.items() if name not in ("requests", "blocks")}
        for key, fields in said["requests"].items():
            if fields is None:
                self.requests.pop(key, None)
            else:
                self.requests.setdefault(key, {}).update(fields)
        self._before, self._last = self._last, (now_s, self.head)
        self.speeds.append(self.rate("generated_tokens"))

    def rate(self, name: str) -> float:
        """A count's growth in a second, between the last two looks; 0 at the first, and where an engine has begun
        anew."""
        if self._before is None or self._last is None or self._last[0] <= self._before[0]:
            return 0.0
        grown = self._last[1]["counts"][name] - self._before[1]["counts"][name]
        return max(0.0, float(grown) / (self._last[0] - self._before[0]))

    def mean_s(self, name: str) -> float | None:
        """The mean of a measured time since the engine started, in seconds; None if there is none yet."""
        total, count = self.head["times"].get(name, (0.0, 0))
        return total / count if count else None

    def counts(self, name: str) -> int:
        count: int = self.head["counts"][name]
        return count


class ServerLook:
    """All engines of a server."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineLook] = {}

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Take in an event; a snapshot has everything, an update what has changed."""
        if kind == "snapshot":
            for engine in self.engines.values():
                engine.requests = {}
        for number, said in data["engines"].items():
            if said is None:
                self.engines.pop(number, None)
            else:
                self.engines.setdefault(number, EngineLook()).take(said, data["time"])


def follow(address: Address, api_key: str | None) -> Iterator[ServerLook]:
    """Yield the engines of a server after each of its events. Raises RemoteError."""
    transport = httpx.HTTPTransport(uds=address.uds) if address.uds is not None else None
    settings = client_settings(address, api_key, SILENCE_S)
    try:
        with closing(httpx.Client(transport=transport, **settings)) as http, http.stream("GET", PATH) as response:
            if response.status_code != httpx.codes.OK:
                check(address, response.status_code, response.read())
            yield from watched(response.iter_lines())
    except httpx.HTTPError as error:
        raise lost(address, error, None) from error


def watched(lines: Iterable[str]) -> Iterator[ServerLook]:
    """Read the lines of a stream of events. Raises RemoteError."""
    found, kind = ServerLook(), ""
    for line in lines:
        name, _, value = line.partition(":")
        if name == "event":
            kind = value.strip()
        elif name == "data":
            try:
                found.take(kind, json.loads(value))
            except (ValueError, LookupError, AttributeError, TypeError) as error:
                raise RemoteError(f"the server sent what is no event of {PATH}: {value[:100]!r}") from error
            yield found
    raise RemoteError("the server has ended")
