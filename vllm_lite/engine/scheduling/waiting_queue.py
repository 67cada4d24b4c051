"""Queues of waiting sequences in the order in which to admit them: sorted by a key, or by what tenants have had.

To enter and to leave costs O(log n) comparisons, and to look at the first few does not depend on how many wait behind
them. While a queue is iterated over, the sequence met last may leave, and others may come in behind it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from vllm_lite.engine.sequence import Sequence, Status

Key = tuple[float, ...]
MIN_PRUNE = 128
"""With fewer sequences it is not worth looking for those that have ended."""


class SortedQueue:
    """Sorts sequences by a key that does not change while they wait, and those with equal keys by their arrival."""

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._num_added = 0
        self._entries: list[tuple[Key, int, Sequence]] = []  # sorted; the number is unique, so sequences never compare
        self._entry_of: dict[Sequence, tuple[Key, int, Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        self._num_added += 1
        entry = self._entry_of[sequence] = (self._key(sequence), self._num_added, sequence)
        insort(self._entries, entry)

    def remove(self, sequence: Sequence) -> None:
        del self._entries[bisect_left(self._entries, self._entry_of.pop(sequence))]

    def __iter__(self) -> Iterator[Sequence]:
        entries, place = self._entries, 0
        while place < len(entries):
            entry = entries[place]
            yield entry[2]
            if place < len(entries) and entries[place] is entry:  # else it left, and the next one has its place
                place += 1

    def __len__(self) -> int:
        return len(self._entries)


class FairQueue:
    """Holds one queue for each tenant (`user`). The tenant that was served least comes first.

    `charge` counts the tokens that are computed for a sequence. A tenant that comes, or comes back, starts level with
    the one that was served least of the tenants with waiting or running sequences: idle time saves nothing up. Its
    count is kept as long as there are such tenants.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        """`key` sorts the sequences of one tenant."""
        self._key = key
        self._queues: dict[str | None, SortedQueue] = {}
        self._served: dict[str | None, float] = {}  # tokens, from a start that all tenants share
        self._order: list[tuple[float, int, str | None]] = []  # tenants that wait, sorted by `served` when last placed
        self._place_of: dict[str | None, tuple[float, int, str | None]] = {}
        self._charged: set[str | None] = set()  # since they were placed
        self._running: set[Sequence] = set()  # those charged that have not ended
        self._num_entered = self._num_waiting = 0
        self._next_prune = self._next_forget = MIN_PRUNE

    def served(self, tenant: str | None) -> float:
        return self._served.get(tenant, 0.0)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.params.user
        queue = self._queues.get(tenant)
        if queue is None:
            self._enter(tenant)
            queue = self._queues[tenant] = SortedQueue(self._key)
            self._num_entered += 1
            self._place(tenant, self._num_entered)
        queue.add(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.params.user
        queue = self._queues[tenant]
        queue.remove(sequence)
        self._num_waiting -= 1
        if not queue:
            del self._queues[tenant]
            del self._order[bisect_left(self._order, self._place_of.pop(tenant))]

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.params.user
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens
        self._charged.add(tenant)
        self._running.add(sequence)
        if len(self._running) >= self._next_prune:
            self._prune()

    def __iter__(self) -> Iterator[Sequence]:
        """Within one pass the tokens of the sequences met so far count as served to their tenants."""
        self._settle()
        places = iter(self._order.copy())
        unmet = next(places, None)
        met: dict[str | None, Iterator[Sequence]] = {}
        again: list[tuple[float, int, str | None]] = []  # a heap of the tenants met
        while unmet is not None or again:
            if unmet is not None and not (again and again[0] < unmet):
                served, number, tenant = unmet
                met[tenant] = iter(self._queues.get(tenant, ()))
                unmet = next(places, None)
            else:
                served, number, tenant = heappop(again)
            sequence = next(met[tenant], None)
            if sequence is not None:
                yield sequence
                heappush(again, (served + sequence.num_tokens, number, tenant))

    def __len__(self) -> int:
        return self._num_waiting

    def _enter(self, tenant: str | None) -> None:
        """Set the count of a tenant that had nothing waiting before."""
        self._settle()
        if len(self._served) >= self._next_forget:  # most had requests that ended before anything was computed
            self._prune()
        level = self._level()
        if level is None:
            self._served.clear()
            level = 0.0
        self._served[tenant] = max(level, self.served(tenant))

    def _settle(self) -> None:
        """Sort the tenants that were charged anew."""
        for tenant in self._charged & self._queues.keys():
            place = self._place_of[tenant]
            del self._order[bisect_left(self._order, place)]
            self._place(tenant, place[1])
        self._charged.clear()

    def _place(self, tenant: str | None, number: int) -> None:
        """Sort a tenant in. `number` decides between equals; it stays while the tenant waits, so that iterating changes
        nothing."""
        place = self._place_of[tenant] = (self._served[tenant], number, tenant)
        insort(self._order, place)

    def _level(self) -> float | None:
        """The least that was served to a tenant with waiting or running sequences. None: there is no such tenant."""
        self._running = {sequence for sequence in self._running if sequence.status is not Status.FINISHED}
        self._next_prune = max(MIN_PRUNE, 2 * len(self._running))
        served = [self._served[sequence.request.params.user] for sequence in self._running]
        return min([*served, *(place[0] for place in self._order[:1])], default=None)

    def _prune(self) -> None:
        """Forget sequences that have ended, and tenants that would start at the same count if they came back."""
        level = self._level()
        running = {sequence.request.params.user for sequence in self._running}
        self._served = {
            tenant: served
            for tenant, served in self._served.items()
            if tenant in running or tenant in self._queues or served > (level or 0.0)
        }
        self._next_forget = max(MIN_PRUNE, 2 * len(self._served))


WaitingQueue = SortedQueue | FairQueue
"""A sequence is in a queue once at most. remove() raises KeyError for one that is not in it."""
