"""EventLog: the events of one stream, encoded once and read by any number of connections, each from any position."""

import asyncio
import zlib
from collections import deque
from itertools import islice
from typing import Any

import msgspec

MAX_BYTES = 16 * 1024 * 1024
"""Maximum bytes of one log; beyond it the oldest events are dropped."""
MANY, MANY_BYTES = 1024, 256 * 1024
"""Maximum number of events in one write, and their maximum bytes unless it is a single event."""


class EventLog:
    """Events by sequence number, which start at 0 and have no gaps."""

    def __init__(self, first: int = 0, max_bytes: int = MAX_BYTES) -> None:
        """`first`: sequence number of the first kept event."""
        self.first = first
        self.is_closed = False
        self.num_bytes = 0
        self._events: deque[bytes] = deque()
        self._new: list[bytes] = []
        self._max_bytes = max_bytes
        self._waiters: set[asyncio.Future[None]] = set()

    @classmethod
    def of(cls, events: bytes, first: int) -> "EventLog":
        """Make the closed log of an ended stream from the decompressed result of packed()."""
        log = cls(first)
        log._new = [event + b"\n\n" for event in events.split(b"\n\n") if event]
        log.close()
        return log

    @property
    def end(self) -> int:
        """Sequence number after the last visible event."""
        return self.first + len(self._events)

    def add(self, kind: str, **fields: Any) -> None:
        """Append an event, which becomes visible at the next wake(). Called by one thread at a time, beside readers."""
        data = msgspec.json.encode({"type": kind, "sequence_number": self.end + len(self._new), **fields})
        self._new.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def since(self, number: int) -> list[bytes] | None:
        """Return visible events from `number` on, a limited number; None if the first of them has been dropped."""
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
        """Compress all kept events with zlib, including those not visible yet; b"" if there are none."""
        events = [*self._events, *self._new]
        packer = zlib.compressobj(1)
        return b"".join([*map(packer.compress, events), packer.flush()]) if events else b""

    def changed(self) -> "asyncio.Future[None]":
        """Return a future that is done at the next wake()."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        return waiter

    def wake(self) -> None:
        """Make new events visible, and drop the oldest beyond the limit. No other thread may add events meanwhile."""
        self._events += self._new
        self.num_bytes += sum(map(len, self._new))
        self._new.clear()
        while self.num_bytes > self._max_bytes and len(self._events) > 1:
            self._drop()
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """End the log: no more events will be added."""
        self.is_closed = True
        self.wake()

    def _drop(self) -> None:
        self.num_bytes -= len(self._events.popleft())
        self.first += 1
