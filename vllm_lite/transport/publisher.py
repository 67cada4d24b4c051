"""Publisher: sends numbered batches to all subscribers over ZeroMQ PUB; a ROUTER repeats those that one has missed.

A message is (topic, sequence number, payload), the number in eight bytes, most significant first. A request for a
replay is the first number wanted; it is answered with (number, payload) for every batch that is still kept, and an
end marker of number -1 without payload.
"""

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from vllm_lite.errors import EngineError
from vllm_lite.transport.interface import Pollable

END = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 64


class Publisher:
    """Never blocks: a subscriber that does not read loses batches, and sees by their numbers which."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, buffer_steps: int, high_water_mark: int
    ) -> None:
        """Raises EngineError if an endpoint cannot be bound."""
        self.next_number = 0
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._endpoints: list[str] = []
        self._replay: zmq.Socket[bytes] | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._bind(zmq.PUB, endpoint, high_water_mark)
            if replay_endpoint is not None:
                # A ROUTER drops what does not fit into its queue; a whole replay has to.
                self._replay = self._bind(zmq.ROUTER, replay_endpoint, 2 * (buffer_steps + 1))
        except BaseException:
            self.close()
            raise

    def _bind(self, kind: int, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # of what comes in
        mask = os.umask(0o177)  # a socket file is for this user only
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EngineError(f"KV events cannot be published on {endpoint}: {error}") from error
        finally:
            os.umask(mask)
        self._endpoints.append(endpoint)
        return socket

    def publish(self, payload: bytes) -> None:
        number = self.next_number.to_bytes(8, "big")
        self.next_number += 1
        self._kept.append((number, payload))
        with suppress(zmq.Again):  # a PUB socket drops rather than say so; either way replay has it
            self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def serve(self) -> None:
        """Answer the replays asked for since the last call."""
        while self._replay is not None:
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[2]) == 8:
                self._send_again(self._replay, frames[0], frames[2])

    def _send_again(self, socket: "zmq.Socket[bytes]", peer: bytes, start: bytes) -> None:
        wanted = [item for item in self._kept if item[0] >= start]
        with suppress(zmq.ZMQError):  # it went away while it was answered
            for number, payload in [*wanted, (END, b"")]:
                socket.send_multipart((peer, b"", number, payload), zmq.NOBLOCK)

    def pollables(self) -> Sequence[Pollable]:
        """The sockets that become readable when serve() has something to do."""
        return () if self._replay is None else (self._replay,)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        for endpoint in self._endpoints:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        self._sockets, self._endpoints = [], []
