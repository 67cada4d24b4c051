"""Subscriber: receives the batches of a Publisher."""

from collections.abc import Sequence

import zmq

from vllm_lite.transport.interface import Pollable


class Subscriber:
    """Receives batches on one thread. Batches published before it was connected are not received."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)

    def recv(self, timeout_s: float) -> tuple[int, bytes] | None:
        """The number and payload of the next batch; None if none arrives within `timeout_s`, or the message is
        malformed."""
        if not self._socket.poll(int(1000 * timeout_s)):
            return None
        frames = self._socket.recv_multipart()
        return (int.from_bytes(frames[1], "big"), frames[2]) if len(frames) == 3 and len(frames[1]) == 8 else None

    def pollables(self) -> Sequence[Pollable]:
        return (self._socket,)

    def close(self) -> None:
        self._socket.close()
