"""Channels within one process: the fake for unit tests, and the transport of --single-process."""

from collections import deque
from collections.abc import Sequence
from threading import Lock

from vllm_lite.errors import EngineError
from vllm_lite.transport.interface import Delivery, Pollable, Wakeup


class _Queue:
    """An unbounded queue for which another thread can wait. It serves its peers round robin, like a ROUTER."""

    def __init__(self) -> None:
        self._items: dict[bytes, deque[bytes]] = {}
        self._lock = Lock()
        self.wakeup = Wakeup()

    def put(self, peer: bytes, payload: bytes) -> None:
        with self._lock:
            self._items.setdefault(peer, deque()).append(payload)
            self.wakeup.set()

    def get(self) -> tuple[bytes, bytes] | None:
        with self._lock:  # the wakeup stays set while messages are left
            if not self._items:
                return None
            peer = next(iter(self._items))
            waiting = self._items.pop(peer)
            payload = waiting.popleft()
            if waiting:
                self._items[peer] = waiting  # at the end
            elif not self._items:
                self.wakeup.clear()
            return peer, payload


class _Channel:
    """State that both sides of an address share; the first side creates it."""

    def __init__(self) -> None:
        self.inbox = _Queue()  # the listener's; connections fill it even before the listener exists
        self.peers: dict[bytes, InprocConnection] = {}
        self.is_bound = False


_channels: dict[str, _Channel] = {}
_lock = Lock()
"""Guards `_channels` and the channels' state except their inboxes."""


def _channel(address: str) -> _Channel:
    if address not in _channels:
        _channels[address] = _Channel()
    return _channels[address]


class InprocListener:
    """The engine's side. Connections may be made before or after it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.tcp_address: str | None = None
        with _lock:
            self._channel = _channel(address)
            if self._channel.is_bound:
                raise EngineError(f"address {address} is in use by another engine")
            self._channel.is_bound = True

    def recv(self) -> tuple[bytes, bytes] | None:
        return self._channel.inbox.get()

    def send(self, peer: bytes, payload: bytes) -> Delivery:
        connection = self._channel.peers.get(peer)
        if connection is None:
            return Delivery.GONE
        connection.inbox.put(b"", payload)
        return Delivery.SENT

    def pollables(self) -> Sequence[Pollable]:
        return self._channel.inbox.wakeup.pollables()

    def close(self) -> None:
        with _lock:
            if _channels.get(self.address) is self._channel:
                del _channels[self.address]
            peers, self._channel.peers = list(self._channel.peers.values()), {}
        for connection in peers:
            connection.peer_closed()
        self._channel.inbox.wakeup.close()


class InprocConnection:
    """A client's or worker's side; messages sent before the listener exists are kept for it."""

    def __init__(self, address: str, identity: bytes) -> None:
        self.address = address
        self.identity = identity
        self.inbox = _Queue()
        self._lost = False
        with _lock:
            self._channel = _channel(address)
            self._channel.peers[identity] = self

    def recv(self) -> bytes | None:
        item = self.inbox.get()
        return None if item is None else item[1]

    def send(self, payload: bytes) -> Delivery:
        self._channel.inbox.put(self.identity, payload)
        return Delivery.SENT

    def peer_closed(self) -> None:
        self._lost = True
        self.inbox.wakeup.set()

    def lost(self) -> bool:
        return self._lost

    def refused(self) -> str | None:
        return None

    def pollables(self) -> Sequence[Pollable]:
        return self.inbox.wakeup.pollables()

    def close(self) -> None:
        with _lock:
            self._channel.peers.pop(self.identity, None)
            is_unused = not (self._channel.is_bound or self._channel.peers)
            if is_unused and _channels.get(self.address) is self._channel:
                del _channels[self.address]
                self._channel.inbox.wakeup.close()
        self.inbox.wakeup.close()
