"""EngineProbe: the connection by which a supervisor watches one engine.

It shows whether the engine is ready, whether it answers, and the reason of its end.
"""

import os
import time
from collections.abc import Sequence

from vllm_lite import transport
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol import PROTOCOL_VERSION, api
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.transport.interface import Pollable

MAX_PING_S = 5.0
"""Maximum seconds between two pings: an idle engine wakes as often by itself."""
PINGS = 4
"""Minimum number of unanswered pings before an engine counts as hung."""
STOPPED_S = 2.0
"""Delay of a look, in seconds, that means that this process was stopped, and perhaps the engine with it."""
LAST_S = 0.3
"""Seconds after an engine's end in which its last message may still arrive."""


class EngineProbe:
    """Watches the engine that listens, or will listen, at `address`. For one thread; time is an argument."""

    def __init__(self, address: str, start_s: float, silence_s: float, now_s: float) -> None:
        """The engine may take `start_s` seconds until it is ready, and then be silent for `silence_s`."""
        self.is_ready = False
        self.reason: str | None = None
        """The engine's own reason why it cannot start or ends; None if it has sent none."""
        self.every_s = min(MAX_PING_S, silence_s / PINGS)
        self._start_s, self._silence_s = start_s, silence_s
        self._heard_s = self._looked_s = now_s
        self._is_stopped = False
        self._pinged_s = now_s
        self._connection = transport.connect(address, f"supervisor-{os.getpid()}-{os.urandom(8).hex()}".encode())
        self._connection.send(client_to_engine.encode(api.Hello(PROTOCOL_VERSION)))

    def look(self, now_s: float, *, is_stopped: bool = False) -> bool:
        """Read the engine's messages, and ping it; called every `every_s`. False if the engine is hung.

        `is_stopped`: its process is stopped, so it is not merely slow to start.
        """
        self._receive(now_s)
        if now_s - self._looked_s > self.every_s + STOPPED_S or (is_stopped and not self._is_stopped):
            self._heard_s = now_s
        self._is_stopped = is_stopped
        self._looked_s = now_s
        if self.is_ready and now_s - self._pinged_s >= self.every_s:
            self._pinged_s = now_s
            self._connection.send(client_to_engine.encode(api.Ping()))
        return now_s - self._heard_s <= self.patience_s

    @property
    def patience_s(self) -> float:
        """Seconds for which the engine may be silent now."""
        return self._silence_s if self.is_ready or self._is_stopped else self._start_s

    def read_last(self) -> None:
        """Read the messages that an ended engine sent before its end."""
        deadline_s = time.monotonic() + LAST_S
        while not self._connection.lost() and (left_s := deadline_s - time.monotonic()) > 0:
            self._receive(0.0)
            if self.reason is not None:
                return
            transport.wait(left_s, self._connection)
        self._receive(0.0)

    def _receive(self, now_s: float) -> None:
        while (payload := self._connection.recv()) is not None:
            self._heard_s = max(self._heard_s, now_s)
            try:
                message: api.ToClient = engine_to_client.decode(payload)
            except ProtocolError:
                continue  # only a sign of life
            if isinstance(message, api.Welcome):
                self.is_ready = True
            elif isinstance(message, (api.Refused, api.Dying)):
                self.reason = message.reason

    def pollables(self) -> Sequence[Pollable]:
        return self._connection.pollables()

    def close(self) -> None:
        self._connection.close()
