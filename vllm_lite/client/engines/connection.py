"""Connecting to an engine: the handshake with one that starts, and the search for one that replaces a dead engine."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_lite import transport
from vllm_lite.errors import ConfigError, EngineDeadError, EngineError, ModelError, ProtocolError
from vllm_lite.protocol import PROTOCOL_VERSION, api
from vllm_lite.protocol.api import ToClient, Welcome
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Connection, KeysOption

RUN_DIR = "vl-"
"""Prefix of the private folders in which launched engines listen, unless they have an address."""
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5
"""Seconds between two attempts to connect to a new engine: at first, and at most."""
ALIVE_POLL_S = 0.05
REASON_S = 0.5
"""Seconds after an engine's end in which its reason may still arrive."""

Alive = Callable[[], str | None]
"""Returns None while an engine's process runs or is being replaced, then the reason why it ended."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's address, and the folder of the client's keys for it, or False for none."""

    address: str
    keys: KeysOption = None

    @property
    def is_removed(self) -> bool:
        """Whether no engine can listen there again: the launcher has ended, and has removed its folder."""
        folder = Path(self.address.removeprefix("ipc://")).parent
        return self.address.startswith("ipc://") and folder.name.startswith(RUN_DIR) and not folder.exists()

    def connect(self, model: str | None = None) -> Connection:
        """Open a connection and send Hello. Raises ConfigError for missing keys, EngineError for a bad address."""
        identity = f"client-{os.getpid()}-{os.urandom(8).hex()}".encode()
        connection = transport.connect(self.address, identity, self.keys)
        try:
            connection.send(client_to_engine.encode(api.Hello(PROTOCOL_VERSION, model)))
        except BaseException:
            connection.close()
            raise
        return connection


def shake_hands(
    place: EngineAddress, model: str | None, timeout_s: float, alive: Alive | None = None
) -> tuple[Connection, Welcome]:
    """Connect to an engine and wait until it, or one that replaces it, serves. Raises like Session.connect."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection = place.connect(model)
        try:
            welcome = _await_welcome(connection, place.address, deadline_s, alive)
        except BaseException:
            connection.close()
            raise
        if welcome is not None:
            return connection, welcome
        connection.close()
        if time.monotonic() >= deadline_s:
            raise EngineError(f"no engine answered at {place.address} within {timeout_s:g} s")
        time.sleep(FIRST_PAUSE_S)


class EngineSearch:
    """Looks for the engine that replaces a dead one, in short steps, until a deadline."""

    def __init__(self, place: EngineAddress, model: str, reason: str, timeout_s: float) -> None:
        """`reason` is the end of the previous engine; the new one has to serve `model`."""
        self._place = place
        self._model = model
        self._reason = reason
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._connection: Connection | None = None
        self._pause_s = FIRST_PAUSE_S
        self._next_s = time.monotonic()
        self._last_words = ""
        """Last message of the latest engine that was reached and did not serve."""

    def step(self, wakeup: Wakeup) -> tuple[Connection, Welcome] | None:
        """Wait a short time for an answer, or for `wakeup`, and clear that.

        Returns the connection, which the caller then owns. Raises EngineDeadError when no engine can be found.
        """
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            words = f"; the last one said: {self._last_words}" if self._last_words else ""
            timeout = f"no other engine took its place within {self._timeout_s:g} s"
            raise EngineDeadError(f"{self._reason}; {timeout}{words}")
        if self._connection is None and now_s >= self._next_s:
            self._connect()
        wait_s = min(ALIVE_POLL_S, self._deadline_s - now_s)
        if self._connection is None:
            transport.wait(min(wait_s, max(0.0, self._next_s - now_s)), wakeup)
        else:
            transport.wait(wait_s, self._connection, wakeup)
        wakeup.clear()
        removed = self._place.is_removed  # checked before reading: messages sent before still count
        found = None if self._connection is None else self._look(self._connection)
        if found is None and removed:
            gone = f"nothing listens at {self._place.address} any more: the folder was removed as its launcher ended"
            raise EngineDeadError(f"{self._reason}; {self._last_words or gone}")
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        try:
            self._connection = self._place.connect()
        except EngineError as error:
            self._retreat(str(error))
        except ConfigError as error:
            raise EngineDeadError(f"{self._reason}; it cannot be reached again: {error}") from error

    def _look(self, connection: Connection) -> tuple[Connection, Welcome] | None:
        try:
            welcome = _read_welcome(connection, self._place.address)
        except ModelError as error:
            raise EngineDeadError(f"{self._reason}; the one that takes its place cannot start: {error}") from error
        except EngineError as error:
            self._retreat(str(error))
            return None
        if welcome is not None:
            if welcome.model != self._model:
                served = f"{welcome.model!r}, not {self._model!r}"
                raise EngineDeadError(f"{self._reason}; the one that took its place serves {served}")
            self._connection = None
            return connection, welcome
        if (refusal := connection.refused()) is not None or connection.lost():
            self._retreat(refusal or "")
        return None

    def _retreat(self, words: str) -> None:
        """Give up this attempt; the next one follows after a pause, which grows each time."""
        self.close()
        self._last_words = words or self._last_words
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)


def _await_welcome(connection: Connection, address: str, deadline_s: float, alive: Alive | None) -> Welcome | None:
    """The engine's answer to Hello; None after the deadline, or if the engine died and may be replaced."""
    while True:
        death = alive() if alive is not None else None  # checked before reading: messages sent before still count
        try:
            welcome = _read_welcome(connection, address)
        except EngineDeadError:
            return None
        if welcome is not None:
            return welcome
        if death is not None:
            _await_refusal(connection, address)
            raise EngineError(f"the engine did not start: {death}")
        refusal = connection.refused()
        if refusal is not None:
            raise EngineError(f"the engine at {address} does not let this client in: {refusal}")
        if connection.lost():
            with suppress(EngineDeadError):
                return _read_welcome(connection, address)  # what it sent before its end
            return None
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        transport.wait(min(left_s, ALIVE_POLL_S), connection)


def _await_refusal(connection: Connection, address: str) -> None:
    """Wait for the Refused that an engine sends before it ends, and raise its reason."""
    deadline_s = time.monotonic() + REASON_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        _read_welcome(connection, address)
        connection.lost()  # clears the event of the loss, which would end the wait below
        transport.wait(left_s, connection)


def _read_welcome(connection: Connection, address: str) -> Welcome | None:
    """The Welcome, if it has arrived. Raises EngineDeadError if this engine ends and will be replaced, ModelError or
    EngineError if it refuses."""
    while (payload := connection.recv()) is not None:
        try:
            message: ToClient = engine_to_client.decode(payload)
        except ProtocolError as error:
            raise EngineError(f"the process at {address} is not an engine of this version: {error}") from error
        if isinstance(message, Welcome):
            return message
        if isinstance(message, api.Refused):
            raise ModelError(message.reason) if message.bad_input else EngineError(message.reason)
        if isinstance(message, api.Dying):
            raise EngineDeadError(message.reason) if not message.is_final else EngineError(message.reason)
    return None
