"""Channels inside one process: the fake behind unit tests and the real thing behind --single-process."""

from collections import deque
from collections.abc import Sequence
from threading import Lock

from vllm_lite.errors import EngineError
from vllm_lite.transport.interface import Delivery, Pollable, Wakeup

_listeners: dict[str, "InprocListener"] = {}
_early: dict[str, list["InprocConnection"]] = {}
"""Connections made before anybody listened on their address."""
_lock = Lock()


class _Queue:
    """An unbounded queue another thread can wait for. It serves its peers round robin, as a ROUTER does."""

    def __init__(self) -> None:
        self._items: dict[bytes, deque[bytes]] = {}
        self._lock = Lock()
        self.wakeup = Wakeup()

    def put(self, peer: bytes, payload: bytes) -> None:
        with self._lock:
            self._items.setdefault(peer, deque()).append(payload)
            self.wakeup.set()

    def get(self) -> tuple[bytes, bytes] | None:
        with self._lock:  # the wakeup stays set as long as something is left
            if not self._items:
                return None
            peer = next(iter(self._items))
            waiting = self._items.pop(peer)
            payload = waiting.popleft()
            if waiting:
                self._items[peer] = waiting  # behind the others
            elif not self._items:
                self.wakeup.clear()
            return peer, payload


class InprocListener:
    """The engine's side. A connection made before or after it is found by name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.tcp_address: str | None = None
        self._inbox = _Queue()
        self._peers: dict[bytes, InprocConnection] = {}
        with _lock:
            if address in _listeners:
                raise EngineError(f"address {address} is in use by another engine")
            _listeners[address] = self
            early = _early.pop(address, [])
        for connection in early:
            connection.join(self)

    def recv(self) -> tuple[bytes, bytes] | None:
        return self._inbox.get()

    def send(self, peer: bytes, payload: bytes) -> Delivery:
        connection = self._peers.get(peer)
        if connection is None:
            return Delivery.GONE
        connection.deliver(payload)
        return Delivery.SENT

    def attach(self, connection: "InprocConnection") -> None:
        self._peers[connection.identity] = connection

    def accept(self, identity: bytes, payload: bytes) -> None:
        self._inbox.put(identity, payload)

    def detach(self, identity: bytes) -> None:
        self._peers.pop(identity, None)

    def pollables(self) -> Sequence[Pollable]:
        return self._inbox.wakeup.pollables()

    def close(self) -> None:
        with _lock:
            if _listeners.get(self.address) is self:
                del _listeners[self.address]
        for connection in list(self._peers.values()):
            connection.peer_closed()
        self._peers.clear()
        self._inbox.wakeup.close()


class InprocConnection:
    """A client's or worker's side; what it sends before the listener exists is kept and handed over then."""

    def __init__(self, address: str, identity: bytes) -> None:
        self.address = address
        self.identity = identity
        self._inbox = _Queue()
        self._unsent: list[bytes] = []
        self._listener: InprocListener | None = None
        self._lost = False
        with _lock:
            listener = _listeners.get(address)
            if listener is None:
                _early.setdefault(address, []).append(self)
        if listener is not None:
            self.join(listener)

    def join(self, listener: InprocListener) -> None:
        listener.attach(self)
        self._listener = listener
        while self._unsent:
            listener.accept(self.identity, self._unsent.pop(0))

    def recv(self) -> bytes | None:
        item = self._inbox.get()
        return None if item is None else item[1]

    def send(self, payload: bytes) -> Delivery:
        if self._listener is None:
            self._unsent.append(payload)
        else:
            self._listener.accept(self.identity, payload)
        return Delivery.SENT

    def deliver(self, payload: bytes) -> None:
        self._inbox.put(b"", payload)

    def peer_closed(self) -> None:
        self._lost = True
        self._inbox.wakeup.set()

    def lost(self) -> bool:
        return self._lost

    def refused(self) -> str | None:
        return None

    def pollables(self) -> Sequence[Pollable]:
        return self._inbox.wakeup.pollables()

    def close(self) -> None:
        with _lock:
            waiting = _early.get(self.address, [])
            if self in waiting:
                waiting.remove(self)
        if self._listener is not None:
            self._listener.detach(self.identity)
        self._inbox.wakeup.close()
