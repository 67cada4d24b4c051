"""Subscriber: gets the batches of a Publisher."""

from collections.abc import Sequence

import zmq

from vllm_lite.transport.interface import Pollable


class Subscriber:
    """Used by one thread. Batches that were published before it was connected do not come."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)

    def recv(self, timeout_s: float) -> tuple[int, bytes] | None:
        """The next batch and its number; None if none has come within `timeout_s`, or what came is none."""
        if not self._socket.poll(int(1000 * timeout_s)):
            return None
        frames = self._socket.recv_multipart()
        return (int.from_bytes(frames[1], "big"), frames[2]) if len(frames) == 3 and len(frames[1]) == 8 else None

    def pollables(self) -> Sequence[Pollable]:
        return (self._socket,)

    def close(self) -> None:
        self._socket.close()
