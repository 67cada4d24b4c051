"""The interface that every transport implements: a Listener for the engine, a Connection for its peers.

Payloads are encoded messages. No call here ever blocks except wait().
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import zmq

from vllm_lite.runtime.wakeup import Wakeup

Pollable = zmq.Socket[bytes] | int
"""Something zmq.Poller can watch: a socket or a file descriptor."""


__all__ = ["Connection", "Delivery", "Listener", "Pollable", "Tcp", "Wakeup", "poller", "wait"]


class Delivery(Enum):
    SENT = "handed over"
    BUSY = "the peer does not read; try again later"
    GONE = "the peer is not connected any more"


@dataclass(frozen=True, slots=True)
class Tcp:
    """Address of a listener for other machines, and the folder of its keys, None: open to anybody, in the clear."""

    address: str
    keys: str | Path | None


class Listener(Protocol):
    """The engine's side: many peers, each known by its identity."""

    address: str
    tcp_address: str | None
    """Where peers on other machines connect, with the port that was taken; None without tcp."""

    def recv(self) -> tuple[bytes, bytes] | None:
        """The next (identity, payload), or None if nothing has arrived. `pollables` stay ready while messages are left
        unread. A peer with one message is not kept waiting by one with many."""

    def send(self, peer: bytes, payload: bytes) -> Delivery: ...

    def pollables(self) -> Sequence[Pollable]: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """A client's or worker's side: it has one peer, and reconnects when that comes back."""

    def recv(self) -> bytes | None:
        """The next payload, or None if nothing has arrived."""

    def send(self, payload: bytes) -> Delivery:
        """GONE is never returned here: what is sent before the peer listens is kept for it."""

    def lost(self) -> bool:
        """True once the peer has gone after having been there."""

    def refused(self) -> str | None:
        """Why the peer will never let this connection in, None as long as it may."""

    def pollables(self) -> Sequence[Pollable]: ...

    def close(self) -> None: ...


class Watched(Protocol):
    def pollables(self) -> Sequence[Pollable]: ...


def poller(*watched: Watched) -> zmq.Poller:
    """A reusable poller over everything in `watched`; hot loops build it once."""
    result = zmq.Poller()
    for item in watched:
        for pollable in item.pollables():
            result.register(pollable, zmq.POLLIN)
    return result


def wait(timeout_s: float, *watched: Watched) -> bool:
    """Block until one of `watched` has something, at most `timeout_s`. True if something came."""
    return bool(poller(*watched).poll(int(max(0.0, timeout_s) * 1000)))
