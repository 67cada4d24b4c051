"""A disk of a simulation: transfers that take the time which a recording has shown, and the keys that are kept."""

import heapq
import statistics
from collections.abc import Iterable

import msgspec

from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.protocol.transfers import ForgetStored, LoadBlocks, StoreBlocks, Ticket, Transfer, Transferred

LEAST_ITEMS = 8
"""Transfers of fewer blocks show what a transfer takes rather than what a block does."""


class DiskTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a block, or a state, takes from the disk into memory, and from there onto the disk."""

    load_s: float
    store_s: float


class TransferTimes:
    """Measures transfers of a replayed engine by the times of the records around them."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._sent: dict[Ticket, tuple[bool, int, float]] = {}
        """By ticket: whether it loads, the number of its items, and when it was asked for."""
        self._ended: list[Ticket] = []
        self._took_s: dict[bool, list[tuple[int, float]]] = {True: [], False: []}

    def pass_by(self, now_s: float) -> None:
        """A record of this time has been applied: what ended before it has ended by now, at the latest."""
        for ticket in self._ended:
            if (sent := self._sent.pop(ticket, None)) is not None:
                loads, count, sent_s = sent
                self._took_s[loads].append((count, now_s - sent_s))
        self._ended.clear()
        for message in self._tier.take_messages():
            if isinstance(message, LoadBlocks | StoreBlocks):
                self._sent[message.ticket] = isinstance(message, LoadBlocks), len(message.keys), now_s

    def ended(self, ticket: Ticket, *, is_busy: bool) -> None:
        """`is_busy`: workers compute something. Who waits for a load is served as soon as it has ended; of a write that
        ends while nobody is there nothing says when that was."""
        sent = self._sent.get(ticket)
        if sent is not None and (sent[0] or is_busy):
            self._ended.append(ticket)

    def fitted(self) -> DiskTimes:
        return DiskTimes(*(_of_one(self._took_s[loads]) for loads in (True, False)))


def _of_one(transfers: list[tuple[int, float]]) -> float:
    """Seconds of one block: the median of large transfers, or of all if there are no such; 0 if there were none."""
    large = [took_s / count for count, took_s in transfers if count >= LEAST_ITEMS]
    return statistics.median(large or [took_s / count for count, took_s in transfers] or [0.0])


class SimulatedDisk:
    """Begins empty, and keeps all it is given. Loads are made one after the other, and so are writes."""

    def __init__(self, times: DiskTimes, generation: int = 1) -> None:
        self._times = times
        self._generation = generation
        self._keys: set[bytes] = set()
        self._free_s = {True: 0.0, False: 0.0}
        self._under_way: list[tuple[float, Ticket, Transferred, Iterable[bytes]]] = []

    @property
    def next_s(self) -> float | None:
        """When the next transfer will have ended; None if none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def begin(self, message: Transfer, now_s: float) -> None:
        if isinstance(message, ForgetStored):
            self._keys.difference_update(self._keys.copy() if message.keys is None else message.keys)
        elif isinstance(message, LoadBlocks | StoreBlocks):
            loads = isinstance(message, LoadBlocks)
            keys = message.keys
            failed = tuple(place for place, key in enumerate(keys) if key not in self._keys) if loads else ()
            begin_s = max(now_s, self._free_s[loads])
            took_s = len(keys) * (self._times.load_s if loads else self._times.store_s)
            self._free_s[loads] = begin_s + took_s
            answer = Transferred(0, self._generation, message.ticket, failed, took_s=begin_s + took_s - now_s)
            heapq.heappush(self._under_way, (begin_s + took_s, message.ticket, answer, () if loads else keys))

    def take(self, now_s: float) -> list[Transferred]:
        """Take the answers of what has ended by now."""
        found = list[Transferred]()
        while self._under_way and self._under_way[0][0] <= now_s:
            _, _, answer, stored = heapq.heappop(self._under_way)
            self._keys.update(stored)
            found.append(answer)
        return found
