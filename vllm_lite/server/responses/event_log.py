"""EventLog: the events of one stream, written once. Any number of connections read it, each from any place."""

import asyncio
import zlib
from collections import deque
from itertools import islice
from typing import Any

import msgspec

MAX_BYTES = 16 * 1024 * 1024
"""What one log holds at most; beyond that the oldest events go."""
MANY, MANY_BYTES = 1024, 256 * 1024
"""Events in one write, and their bytes, beyond which it has no other one."""


class EventLog:
    """Events by their sequence numbers, which count from 0 without gaps."""

    def __init__(self, first: int = 0, max_bytes: int = MAX_BYTES) -> None:
        """`first` is the number of the first event that is kept."""
        self.first = first
        self.is_closed = False
        self.num_bytes = 0
        self._events: deque[bytes] = deque()
        self._new: list[bytes] = []
        self._max_bytes = max_bytes
        self._waiters: set[asyncio.Future[None]] = set()

    @classmethod
    def of(cls, events: bytes, first: int) -> "EventLog":
        """Make the log of a stream that has ended, of what packed() returned, unpacked."""
        log = cls(first)
        log._new = [event + b"\n\n" for event in events.split(b"\n\n") if event]
        log.close()
        return log

    @property
    def end(self) -> int:
        """The number behind the last event that is shown."""
        return self.first + len(self._events)

    def add(self, kind: str, **fields: Any) -> None:
        """Write an event, which wake() shows. One thread at a time may do so, beside those that read."""
        data = msgspec.json.encode({"type": kind, "sequence_number": self.end + len(self._new), **fields})
        self._new.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def since(self, number: int) -> list[bytes] | None:
        """Return events from `number` on, not all if there are many; None if the first of them is no longer kept."""
        if number < self.first:
            return None
        found, num_bytes = list[bytes](), 0
        for event in islice(self._events, number - self.first, number - self.first + MANY):
            num_bytes += len(event)
            if found and num_bytes > MANY_BYTES:
                break
            found.append(event)
        return found

    def forget(self, number: int) -> None:
        """Keep only events from `number` on."""
        while self._events and self.first < number:
            self._drop()

    def packed(self) -> bytes:
        """All that is kept, with what is not shown yet, packed by zlib; b"" if that is nothing."""
        events = [*self._events, *self._new]
        packer = zlib.compressobj(1)
        return b"".join([*map(packer.compress, events), packer.flush()]) if events else b""

    def changed(self) -> "asyncio.Future[None]":
        """Return what is done at the next wake()."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        return waiter

    def wake(self) -> None:
        """Show what is new. Nobody may add to it meanwhile."""
        self._events += self._new
        self.num_bytes += sum(map(len, self._new))
        self._new.clear()
        while self.num_bytes > self._max_bytes and len(self._events) > 1:
            self._drop()
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Nothing more will come."""
        self.is_closed = True
        self.wake()

    def _drop(self) -> None:
        self.num_bytes -= len(self._events.popleft())
        self.first += 1
