"""Residency: histograms of cached blocks' lifetime, idle time before eviction, and time between uses.

Every n-th allocated block is followed, which is cheap and the same in every run. The histograms show whether the pool
is too small: blocks evicted soon after their last use would have been used again.
"""

from collections.abc import Callable, Sequence

from vllm_lite.engine.blocks.pool import BlockPool, PoolObserver
from vllm_lite.protocol.stats import BlockHistograms, Histogram, bounds

BLOCK_S = bounds("0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10 20 30 60 120 300 600 1200 1800")
"""vLLM's bucket bounds, so that dashboards can compare."""


class Residency(PoolObserver):
    """Observes `pool`: follows one of every `one_in` allocated blocks until it is evicted, and fills `histograms`."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float], one_in: int) -> None:
        self.histograms = BlockHistograms(*(Histogram.over(BLOCK_S) for _ in range(3)))
        self._clock = clock
        self._one_in = one_in
        self._num_to_skip = 0
        self.followed: dict[int, tuple[float, float]] = {}
        """Block id -> (time of allocation, time of last use)."""
        pool.observers.append(self)

    def allocated(self, ids: Sequence[int]) -> None:
        followed = self.followed
        if followed:
            for block_id in ids:  # freed without having been cached, so it could not be reused
                followed.pop(block_id, None)
        sampled = ids[self._num_to_skip :: self._one_in]
        self._num_to_skip = (self._num_to_skip - len(ids)) % self._one_in
        if sampled:
            now_s = self._clock()
            followed.update((block_id, (now_s, now_s)) for block_id in sampled)

    def touched(self, ids: Sequence[int]) -> None:
        followed = self.followed
        if not followed:
            return
        for block_id in ids:
            times = followed.get(block_id)
            if times is not None:
                now_s = self._clock()
                self.histograms.reuse_gap_s.observe(now_s - times[1])
                followed[block_id] = times[0], now_s

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        times = self.followed.pop(block_id, None)
        if times is not None:
            now_s = self._clock()
            self.histograms.lifetime_s.observe(now_s - times[0])
            self.histograms.idle_before_evict_s.observe(now_s - times[1])

    def cleared(self) -> None:
        for block_id in list(self.followed):
            self.evicted(block_id, b"")
