"""ZeroMQ channels: ROUTER on the engine's side, DEALER on its peers', non-blocking, with all limits set.

Socket options apply to addresses bound or connected afterwards: a ROUTER without keys on its ipc address has them on
its tcp address.
"""

import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq

from vllm_lite.errors import EngineError
from vllm_lite.protocol.codec import MAX_CLIENT_BYTES
from vllm_lite.runtime import log
from vllm_lite.transport.authenticator import EVENTS, Authenticator
from vllm_lite.transport.interface import Delivery, Pollable, Tcp
from vllm_lite.transport.keys import Authorised, ClientKeys, load_engine_keys
from vllm_lite.transport.time_slice import short_slices

HIGH_WATER_MARK = 1000
"""Maximum number of messages queued for one peer; beyond it send() returns BUSY."""
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
LINGER_MS = 1_000
HANDSHAKE_MS = 10_000
FIRST_PAUSE_MS, MAX_PAUSE_MS = 20, 500
"""Milliseconds between two attempts to connect to an address without a listener: the first, and the maximum."""
MAX_FAILED_HANDSHAKES = 3
"""Number of handshakes that the other side may end without a reason, as one that is starting does; more mean a
refusal."""

logger = log.get(__name__)


def _configured(kind: int) -> zmq.Socket[bytes]:
    with short_slices():  # the first socket starts ZeroMQ's own thread
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_CLIENT_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return socket


class ZmqListener:
    """A bound ROUTER. ZeroMQ itself refuses peers with an identity in use."""

    def __init__(self, address: str, tcp: Tcp | None = None, max_bytes: int = MAX_CLIENT_BYTES) -> None:
        """`address` is ipc://PATH. Raises EngineError, and ConfigError for bad keys."""
        self.address = address
        self.tcp_address: str | None = None
        self._authenticator: Authenticator | None = None
        path = address.removeprefix("ipc://")
        if os.path.exists(path) and answers(address):
            raise EngineError(f"address {address} is in use by another engine")
        self._socket = _configured(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        mask = os.umask(0o177)  # the socket file is private to this user
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise EngineError(f"cannot listen on {address}: {error}") from error
        finally:
            os.umask(mask)
        if tcp is not None:
            try:
                self._listen_on(tcp)
            except BaseException as error:
                self.close()
                if isinstance(error, zmq.ZMQError):
                    raise EngineError(f"cannot listen on {tcp.address}: {error}") from error
                raise

    def _listen_on(self, tcp: Tcp) -> None:
        if tcp.keys is None:
            logger.warning(
                "insecure: anyone who can reach %s can use this engine, and nothing there is encrypted", tcp.address
            )
        else:
            keys = load_engine_keys(tcp.keys)
            self._authenticator = Authenticator(Authorised(keys.clients), self._socket.get_monitor_socket(EVENTS))
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, self._authenticator.domain)
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else clients could connect while no authenticator runs
        self._socket.setsockopt(zmq.IPV6, "[" in tcp.address)
        self._socket.bind(tcp.address)
        self.tcp_address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        logger.info("clients %s may connect to %s", "with keys" if tcp.keys else "of any kind", self.tcp_address)

    def recv(self) -> tuple[bytes, bytes] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        # A frame count other than two comes from a foreign client: an empty payload fails to decode, and is counted as
        # a malformed message.
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
        # The monitor is closed before the authenticator that reads it: ZeroMQ's thread waits for ever to report unread
        # events.
        if not self._socket.closed:
            self._socket.disable_monitor()
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        if not self._socket.closed:
            self._socket.close()
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


class ZmqConnection:
    """A connected DEALER. Its monitor reports at once if the peer's process has ended, or refuses the connection."""

    def __init__(self, address: str, identity: bytes, keys: ClientKeys | None = None) -> None:
        self._socket = _configured(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, FIRST_PAUSE_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_PAUSE_MS)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._has_keys = keys is not None
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._was_there = False
        self._lost = False
        self._refused: str | None = None
        self._failed_handshakes = 0
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(f"cannot connect to {address}: {error}") from error

    def recv(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            if not self._was_there:  # else the unread connection event would end every wait
                self._listen()
            return None

    def send(self, payload: bytes) -> Delivery:
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.BUSY
        return Delivery.SENT

    def lost(self) -> bool:
        self._listen()
        return self._lost

    def refused(self) -> str | None:
        self._listen()
        return self._refused

    def _listen(self) -> None:
        while self._monitor.poll(0):
            (event,) = struct.unpack_from("=H", self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._was_there = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._lost = self._lost or self._was_there
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused = "it does not know this client's key, which has to be among its clients' keys"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refused = "it uses no keys" if self._has_keys else "it accepts only clients with keys"
            else:
                self._failed_handshakes += 1
                if self._failed_handshakes >= MAX_FAILED_HANDSHAKES and not self._was_there:
                    other = "its key differs from this client's server.key" if self._has_keys else "it is not an engine"
                    self._refused = f"it ends every handshake; perhaps {other}"

    def pollables(self) -> Sequence[Pollable]:
        return (self._socket, self._monitor)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()


def finish() -> None:
    """Wait, at most LINGER_MS, until the messages of closed channels have been sent. Called at the end of a process.

    ZeroMQ lingers only while a context is terminated, and the interpreter's exit does not terminate it: messages would
    be lost if the process ends before ZeroMQ's thread has written them.
    """
    # On a thread, because term() would wait for ever for a channel that was left open.
    term = threading.Thread(target=zmq.Context.instance().term, name="flush sockets", daemon=True)
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
