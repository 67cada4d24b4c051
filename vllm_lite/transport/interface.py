"""The interface of transports: a Listener for the engine, a Connection for its peers.

Payloads are encoded messages. No call here blocks except wait().
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import zmq

from vllm_lite.runtime.wakeup import Wakeup

Pollable = zmq.Socket[bytes] | int
"""Argument of zmq.Poller: a socket or a file descriptor."""


__all__ = ["Connection", "Delivery", "Listener", "Pollable", "Tcp", "Wakeup", "poller", "wait"]


class Delivery(Enum):
    SENT = "handed over"
    BUSY = "the peer does not read; try again later"
    GONE = "the peer is not connected any more"


@dataclass(frozen=True, slots=True)
class Tcp:
    """Address of a listener for other machines, and the folder of its keys; None: open to all, unencrypted."""

    address: str
    keys: str | Path | None


class Listener(Protocol):
    """The engine's side: many peers, each known by its identity."""

    address: str
    tcp_address: str | None
    """Address for peers on other machines, with the actual port; None without tcp."""

    def recv(self) -> tuple[bytes, bytes] | None:
        """The next (identity, payload), or None if nothing has arrived. `pollables` stay ready while messages are
        unread. Peers are served fairly: many messages of one do not delay another's."""

    def send(self, peer: bytes, payload: bytes) -> Delivery: ...

    def pollables(self) -> Sequence[Pollable]: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """A client's or worker's side, with one peer; reconnects when the peer returns."""

    def recv(self) -> bytes | None:
        """The next payload, or None if nothing has arrived."""

    def send(self, payload: bytes) -> Delivery:
        """Send a message; never returns GONE: messages sent before the peer listens are kept for it."""

    def lost(self) -> bool:
        """Whether the peer was connected and has gone."""

    def refused(self) -> str | None:
        """The reason why the peer will never accept this connection, None while it may."""

    def pollables(self) -> Sequence[Pollable]: ...

    def close(self) -> None: ...


class Watched(Protocol):
    def pollables(self) -> Sequence[Pollable]: ...


def poller(*watched: Watched) -> zmq.Poller:
    """A reusable poller over all of `watched`; hot loops build it once."""
    result = zmq.Poller()
    for item in watched:
        for pollable in item.pollables():
            result.register(pollable, zmq.POLLIN)
    return result


def wait(timeout_s: float, *watched: Watched) -> bool:
    """Block until one of `watched` is ready, at most `timeout_s`. Returns whether one is."""
    return bool(poller(*watched).poll(int(max(0.0, timeout_s) * 1000)))
