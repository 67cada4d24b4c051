"""ZeroMQ channels: ROUTER on the engine's side, DEALER on the others', never blocking, with every limit set."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq

from vllm_lite.errors import EngineError
from vllm_lite.protocol.codec import MAX_MESSAGE_BYTES
from vllm_lite.transport.interface import Delivery, Pollable

HIGH_WATER_MARK = 1000
"""Messages that may wait for one peer; beyond it send() says BUSY."""
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
LINGER_MS = 1_000


def _configured(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return socket


class ZmqListener:
    """A bound ROUTER. Peers with an identity that is in use are refused by ZeroMQ itself."""

    def __init__(self, address: str) -> None:
        self.address = address
        path = address.removeprefix("ipc://")
        if os.path.exists(path) and answers(address):
            raise EngineError(f"address {address} is in use by another engine")
        self._socket = _configured(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        mask = os.umask(0o177)  # the socket file is for this user only
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise EngineError(f"cannot listen on {address}: {error}") from error
        finally:
            os.umask(mask)

    def recv(self) -> tuple[bytes, bytes] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        # A frame count other than two comes from something that does not speak this protocol: an empty payload
        # fails to decode and is counted like any other malformed message.
        return (frames[0], frames[1]) if len(frames) == 2 else (frames[0], b"")

    def send(self, peer: bytes, payload: bytes) -> Delivery:
        try:
            self._socket.send_multipart((peer, payload), zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.BUSY
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def pollables(self) -> Sequence[Pollable]:
        return (self._socket,)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


class ZmqConnection:
    """A connected DEALER with a monitor that tells at once when the other side's process ends."""

    def __init__(self, address: str, identity: bytes) -> None:
        self._socket = _configured(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lost = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(f"cannot connect to {address}: {error}") from error

    def recv(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, payload: bytes) -> Delivery:
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.BUSY
        return Delivery.SENT

    def lost(self) -> bool:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()  # the only event asked for
            self._lost = True
        return self._lost

    def pollables(self) -> Sequence[Pollable]:
        return (self._socket, self._monitor)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()


def finish() -> None:
    """The last thing a process does with its closed channels: wait, at most LINGER_MS, until what they sent has left.

    Linger counts only while a context is terminated, and the interpreter's own exit does not terminate it: last words
    would be lost whenever the process ends before ZeroMQ's thread has written them.
    """
    # On a thread, because term() would wait for ever for a channel somebody left open.
    term = threading.Thread(target=zmq.Context.instance().term, name="last words", daemon=True)
    term.start()
    term.join(1.5 * LINGER_MS / 1000)


def answers(address: str) -> bool:
    """True if some process listens behind an existing socket file; a file left by a killed one answers nothing."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:
            return False
    return True
