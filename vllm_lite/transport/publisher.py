"""Publisher: sends numbered batches to all subscribers over ZeroMQ PUB; a ROUTER replays missed ones.

A message is (topic, sequence number, payload), with the number in eight big-endian bytes. A replay request is the first
number wanted; it is answered with (number, payload) for every batch that is still kept, and an end marker of number -1
without payload.

Each call of serve() sends a part of one replay only, and a peer gets no more than it reads. So a pass of the engine's
loop takes a millisecond, however many peers request however much, and each batch is in memory once.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from vllm_lite.errors import EngineError
from vllm_lite.transport.interface import Pollable

END = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 64
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Maximum bytes of batches kept for replays, regardless of their number."""
SLICE_BATCHES = 64
"""Maximum number of batches sent by one call of serve(), and queued for a peer that does not read."""
SLICE_BYTES = 1024 * 1024
"""Bytes after which a call of serve() stops sending."""
MAX_REPLAYS = 8
"""Maximum number of replays in progress; further requests are ignored."""
MAX_REQUESTS = 64
"""Maximum number of requests read by one call of serve()."""
STALL_S = 10.0
"""Seconds without reading after which a peer's replay ends."""
NEXT_SLICE_MS = 1
STALLED_MS = 5


class _Replay:
    """The rest of a peer's replay: the batches from `number` to `end` - 1, then the end marker."""

    __slots__ = ("end", "number", "stalled_since_s")

    def __init__(self, number: int, end: int) -> None:
        self.number, self.end = number, end
        self.stalled_since_s: float | None = None


class Publisher:
    """Publishes without blocking: a subscriber that does not read loses batches, and detects it by their numbers."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, buffer_steps: int, high_water_mark: int
    ) -> None:
        """Bind the endpoints. Raises EngineError if one cannot be bound."""
        self.next_number = 0
        self._topic = topic.encode()
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.kept_bytes = 0
        self._endpoints: list[str] = []
        self._replay: zmq.Socket[bytes] | None = None
        self.replays: dict[bytes, _Replay] = {}
        """Replays in progress by peer, in round-robin order."""
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._bind(zmq.PUB, endpoint, high_water_mark)
            if replay_endpoint is not None:
                self._replay = self._bind(zmq.ROUTER, replay_endpoint, SLICE_BATCHES)
        except BaseException:
            self.close()
            raise

    def _bind(self, kind: int, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # for incoming messages
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # report peers that have gone, or do not read
        mask = os.umask(0o177)  # socket files are private to this user
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EngineError(f"KV events cannot be published on {endpoint}: {error}") from error
        finally:
            os.umask(mask)
        self._endpoints.append(endpoint)
        return socket

    def publish(self, payload: bytes) -> None:
        if len(self.kept) == self.kept.maxlen:
            self._forget_oldest()
        self.kept.append((self.next_number, payload))
        self.kept_bytes += len(payload)
        while self.kept_bytes > MAX_KEPT_BYTES:
            self._forget_oldest()
        number = self.next_number.to_bytes(8, "big")
        self.next_number += 1
        with suppress(zmq.Again):  # a PUB socket drops silently; in either case a replay has it
            self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def _forget_oldest(self) -> None:
        _, payload = self.kept.popleft()
        self.kept_bytes -= len(payload)

    # ---- replays

    def serve(self) -> None:
        """Read replay requests, and send the next part of one replay."""
        if self._replay is None:
            return
        self._read_requests(self._replay)
        if self.replays:
            peer, replay = next(iter(self.replays.items()))
            del self.replays[peer]
            if self._send_slice(self._replay, peer, replay):
                self.replays[peer] = replay  # at the end

    def _read_requests(self, socket: "zmq.Socket[bytes]") -> None:
        """Read requests; a new request of a peer replaces its earlier one."""
        for _ in range(MAX_REQUESTS):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            if frames[0] in self.replays or len(self.replays) < MAX_REPLAYS:
                self.replays[frames[0]] = _Replay(int.from_bytes(frames[2], "big"), self.next_number)

    def _send_slice(self, socket: "zmq.Socket[bytes]", peer: bytes, replay: _Replay) -> bool:
        """Send a peer its next batches. Returns whether its replay continues."""
        first = self.kept[0][0] if self.kept else self.next_number
        num_bytes = 0
        try:
            for _ in range(SLICE_BATCHES):
                number = max(replay.number, first)
                if number >= replay.end:
                    socket.send_multipart((peer, b"", END, b""), zmq.NOBLOCK)
                    return False
                if num_bytes > SLICE_BYTES:
                    break
                payload = self.kept[number - first][1]
                # Large payloads are shared with the peer's queue, not copied.
                socket.send_multipart((peer, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK, copy=False)
                num_bytes += len(payload)
                replay.number, replay.stalled_since_s = number + 1, None
        except zmq.Again:
            now_s = time.monotonic()
            replay.stalled_since_s = replay.stalled_since_s or now_s
            return now_s - replay.stalled_since_s < STALL_S
        except zmq.ZMQError:  # the peer has gone
            return False
        return True

    @property
    def patience_ms(self) -> int | None:
        """Milliseconds until serve() has to be called again even if nothing arrives; None: never."""
        if not self.replays:
            return None
        moves = any(replay.stalled_since_s is None for replay in self.replays.values())
        return NEXT_SLICE_MS if moves else STALLED_MS

    def pollables(self) -> Sequence[Pollable]:
        """Sockets that become readable when serve() has work."""
        return () if self._replay is None else (self._replay,)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        for endpoint in self._endpoints:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        self._sockets, self._endpoints = [], []
