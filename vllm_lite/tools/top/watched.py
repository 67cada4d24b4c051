"""Follows a server's /v1/live: its engines' states, and rates between two states."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from vllm_lite.errors import RemoteError
from vllm_lite.tools.chat.remote_server import Address, check, lines_of, lost, open_client

PATH = "/v1/live"
SILENCE_S = 30.0
"""Timeout without data; a server sends an event twice a second."""
NUM_KEPT = 120
"""Number of speeds kept: a minute's."""


class EngineLook:
    """An engine's state from the events. `head` has the fields that every event has completely; `requests` are
    merged."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.speeds: deque[float] = deque(maxlen=NUM_KEPT)
        """Tokens generated per second, for each event."""
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

    @property
    def is_seen_twice(self) -> bool:
        return self._before is not None

    @property
    def time_s(self) -> float:
        """The server's time at the last event."""
        return 0.0 if self._last is None else self._last[0]

    def rate(self, name: str) -> float:
        """A counter's growth per second between the last two events; 0 after the first one, or after an engine's
        restart."""
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
    """All engines of a server; for a server with several models, also the models and their memory limit."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineLook] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.memory_limit_bytes = 0
        self.time_s = 0.0
        self.is_whole = True
        """Whether the last event was about all models."""

    @property
    def has_speeds(self) -> bool:
        """Whether there are two states of each engine."""
        shown = set(map(model_of, self.engines))
        missing = [name for name, model in self.models.items() if _has_engines(model) and name not in shown]
        return self.is_whole and not missing and all(engine.is_seen_twice for engine in self.engines.values())

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Process an event: a snapshot is complete, an update has changes. An event with a model is about that model's
        engines only."""
        of, engines, models = data.get("model"), data.get("engines"), data.get("models")
        if engines is None and models is None:
            raise ValueError("neither engines nor models")
        self.time_s, self.is_whole = data["time"], of is None
        if engines is not None:
            if kind == "snapshot":
                self._forget(of, engines)
            for number, said in engines.items():
                if said is None:
                    self.engines.pop(number, None)
                else:
                    self.engines.setdefault(number, EngineLook()).take(said, data["time"])
        if models is not None:
            self.memory_limit_bytes = data["memory_limit_bytes"]
            self._take_models(kind, models)

    def _forget(self, of: str | None, engines: dict[str, Any]) -> None:
        """Remove engines that a snapshot does not have."""
        for number, engine in list(self.engines.items()):
            if of is not None and model_of(number) != of:
                continue
            if number in engines:
                engine.requests = {}
            else:
                del self.engines[number]

    def _take_models(self, kind: str, models: dict[str, Any]) -> None:
        if kind == "snapshot":
            self.models = {}
        for name, fields in models.items():
            if fields is None:
                self.models.pop(name, None)
            else:
                self.models.setdefault(name, {}).update(fields)
        for number in list(self.engines):
            if not _has_engines(self.models.get(model_of(number), {"state": "unloaded"})):
                del self.engines[number]


def model_of(number: str) -> str:
    """The model of the engine with this number, like `chat/0`; "" on a server with one model."""
    return number.rpartition("/")[0]


def _has_engines(model: dict[str, Any]) -> bool:
    return model["state"] in ("loaded", "sleeping") and not model.get("hidden")


def follow(address: Address, api_key: str | None, model: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the kind and data of a server's events; with several models only those of `model`, if given. Raises
    RemoteError."""
    asked = {} if model is None else {"model": model}
    try:
        with open_client(address, api_key, SILENCE_S) as http, http.stream("GET", PATH, params=asked) as response:
            if response.status_code != httpx.codes.OK:
                check(address, response.status_code, response.read())
            yield from events(lines_of(response))
    except httpx.HTTPError as error:
        raise lost(address, error, None) from error


def events(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Parse the lines of a stream of events. Raises RemoteError."""
    kind = ""
    for line in lines:
        name, _, value = line.partition(":")
        if name == "event":
            kind = value.strip()
        elif name == "data":
            try:
                yield kind, json.loads(value)
            except ValueError as error:
                raise _wrong(value) from error
    raise RemoteError("the server has ended")


def looks(found: Iterable[tuple[str, Any]]) -> Iterator[ServerLook]:
    """Yield the state of a server after each of its events. Raises RemoteError."""
    look = ServerLook()
    for kind, data in found:
        take(look, kind, data)
        yield look


def take(look: ServerLook, kind: str, data: Any) -> None:
    """Process an event. Raises RemoteError for an invalid one."""
    try:
        look.take(kind, data)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _wrong(json.dumps(data)) from error


def _wrong(text: str) -> RemoteError:
    return RemoteError(f"the server sent data that is not an event of {PATH}: {text[:100]!r}")
