"""Residency: how long cached blocks stay, how long they lie idle before they are evicted, how soon they are used again.

A sample of the blocks is followed, every n-th that is allocated: cheap, and the same in every run. Answers whether the
pool is too small: blocks evicted soon after their last use would have been used again.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_lite.engine.blocks.pool import BlockPool

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Distribution(NamedTuple):
    """`counts[i]` values were at most `bounds_s[i]`, and more than the bound before; the last count has no bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    num_values: int
    sum_s: float


class Snapshot(NamedTuple):
    lifetime: Distribution
    """From allocation to eviction."""
    idle_before_eviction: Distribution
    """From the last use to eviction."""
    reuse_gap: Distribution
    """From one use to the next."""
    num_sampled: int
    num_followed: int


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, value_s: float) -> None:
        self._counts[bisect_left(BOUNDS_S, value_s)] += 1
        self._sum_s += value_s

    def snapshot(self) -> Distribution:
        return Distribution(BOUNDS_S, tuple(self._counts), sum(self._counts), self._sum_s)


class Residency:
    """An observer of a BlockPool. Follows one of every `one_in` blocks allocated, until it is evicted."""

    def __init__(self, clock: Callable[[], float], one_in: int = 100) -> None:
        self._clock = clock
        self._one_in = one_in
        self._num_to_skip = 0
        self._num_sampled = 0
        self._followed: dict[int, tuple[float, float]] = {}
        """Of a block: when it was allocated, and last used."""
        self._lifetime, self._idle, self._gap = Histogram(), Histogram(), Histogram()

    @classmethod
    def attach(cls, pool: BlockPool, clock: Callable[[], float], one_in: int = 100) -> "Residency":
        """A new observer of `pool`."""
        residency = cls(clock, one_in)
        pool.observers.append(residency)
        return residency

    def allocated(self, ids: Sequence[int]) -> None:
        followed = self._followed
        if followed:
            for block_id in ids:  # freed without ever having been cached: nobody could have used it again
                followed.pop(block_id, None)
        sampled = ids[self._num_to_skip :: self._one_in]
        self._num_to_skip = (self._num_to_skip - len(ids)) % self._one_in
        if sampled:
            now_s = self._clock()
            self._num_sampled += len(sampled)
            followed.update((block_id, (now_s, now_s)) for block_id in sampled)

    def touched(self, ids: Sequence[int]) -> None:
        followed = self._followed
        if not followed:
            return
        for block_id in ids:
            times = followed.get(block_id)
            if times is not None:
                now_s = self._clock()
                self._gap.add(now_s - times[1])
                followed[block_id] = times[0], now_s

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        times = self._followed.pop(block_id, None)
        if times is not None:
            now_s = self._clock()
            self._lifetime.add(now_s - times[0])
            self._idle.add(now_s - times[1])

    def cleared(self) -> None:
        for block_id in list(self._followed):
            self.evicted(block_id, b"")

    def snapshot(self) -> Snapshot:
        lifetime, idle, gap = self._lifetime.snapshot(), self._idle.snapshot(), self._gap.snapshot()
        return Snapshot(lifetime, idle, gap, self._num_sampled, len(self._followed))
