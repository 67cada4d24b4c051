"""Queues of waiting sequences in order of admission: sorted by a key, or by the tokens served to each tenant.

Adding and removing takes O(log n) comparisons; iterating over the first few does not depend on the queue's length.
During iteration the latest sequence may be removed, and others may be added behind it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from vllm_lite.engine.sequence import Sequence, Status

Key = tuple[float, ...]
MIN_PRUNE = 128
"""Minimum number of sequences, or tenants, before ended ones are pruned."""


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
            if place < len(entries) and entries[place] is entry:  # else it was removed, and the next one moved up
                place += 1

    def __len__(self) -> int:
        return len(self._entries)


class FairQueue:
    """One queue per tenant (`user`). The tenant that was served least comes first.

    `charge` counts the tokens computed for a sequence. A tenant that enters or returns starts with the smallest count
    of the tenants with waiting or running sequences, so that idle time earns no credit. Counts are kept as long as
    there are such tenants.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        """`key` sorts the sequences of one tenant."""
        self._key = key
        self._queues: dict[str | None, SortedQueue] = {}
        self._served: dict[str | None, float] = {}  # tokens, from a start that all tenants share
        self._order: list[tuple[float, int, str | None]] = []  # tenants that wait, sorted by `served` when last placed
        self._place_of: dict[str | None, tuple[float, int, str | None]] = {}
        self._charged: set[str | None] = set()  # tenants charged since they were placed in `_order`
        self._running: set[Sequence] = set()  # charged sequences, ended ones until they are pruned
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
        """Iterate in order of admission; tokens of sequences yielded so far count as served to their tenants."""
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
        """Set the count of a tenant that had no waiting sequence."""
        self._settle()
        if len(self._served) >= self._next_forget:  # many may be of tenants without live requests
            self._prune()
        level = self._level()
        if level is None:
            self._served.clear()
            level = 0.0
        self._served[tenant] = max(level, self.served(tenant))

    def _settle(self) -> None:
        """Sort the charged tenants into `_order` again."""
        for tenant in self._charged & self._queues.keys():
            place = self._place_of[tenant]
            del self._order[bisect_left(self._order, place)]
            self._place(tenant, place[1])
        self._charged.clear()

    def _place(self, tenant: str | None, number: int) -> None:
        """Sort a tenant into `_order`. `number` decides between equal counts; it stays while the tenant waits, so that
        iterating does not change the order."""
        place = self._place_of[tenant] = (self._served[tenant], number, tenant)
        insort(self._order, place)

    def _level(self) -> float | None:
        """Smallest count of the tenants with waiting or running sequences. None: there is no such tenant."""
        self._running = {sequence for sequence in self._running if sequence.status is not Status.FINISHED}
        self._next_prune = max(MIN_PRUNE, 2 * len(self._running))
        served = [self._served[sequence.request.params.user] for sequence in self._running]
        return min([*served, *(place[0] for place in self._order[:1])], default=None)

    def _prune(self) -> None:
        """Forget ended sequences, and tenants that would start with the same count if they came back."""
        level = self._level()
        running = {sequence.request.params.user for sequence in self._running}
        self._served = {
            tenant: served
            for tenant, served in self._served.items()
            if tenant in running or tenant in self._queues or served > (level or 0.0)
        }
        self._next_forget = max(MIN_PRUNE, 2 * len(self._served))


WaitingQueue = SortedQueue | FairQueue
"""A sequence is in a queue at most once. remove() raises KeyError for a sequence that is not in the queue."""
