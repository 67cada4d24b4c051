"""Residency metrics with a clock that is moved by hand."""

import pytest

from tests.unit.test_meter import Bench, count
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.observe.residency import BLOCK_S, Residency
from vllm_lite.executor.simulated import VirtualClock
from vllm_lite.protocol.stats import Histogram


def make(num_blocks: int = 4, one_in: int = 1) -> tuple[BlockPool, VirtualClock, Residency]:
    pool, clock = BlockPool(num_blocks), VirtualClock(100.0)
    return pool, clock, Residency(pool, clock, one_in)


def cached_block(pool: BlockPool, block_hash: bytes) -> int:
    (block_id,) = pool.get_new_blocks(1)
    pool.cache_block(block_id, block_hash)
    return block_id


def values(histogram: Histogram) -> list[float]:
    """The upper bounds of the buckets that hold something, once for each value."""
    bounds = (*histogram.bounds, float("inf"))
    return [bound for bound, count in zip(bounds, histogram.counts, strict=True) for _ in range(count)]


def test_a_block_is_followed_from_allocation_over_reuse_to_eviction() -> None:
    pool, clock, residency = make(2)
    block_id = cached_block(pool, b"a")
    pool.free([block_id])
    clock.advance_to(102.0)
    pool.touch([block_id])
    clock.advance_to(102.5)
    pool.touch([block_id])
    pool.free([block_id, block_id])
    clock.advance_to(120.0)
    cached_block(pool, b"b")
    seen = residency.histograms
    assert (values(seen.lifetime_s), seen.lifetime_s.sum) == ([20.0], 20.0)
    assert (values(seen.idle_before_evict_s), seen.idle_before_evict_s.sum) == ([20.0], 17.5)
    assert (values(seen.reuse_gap_s), seen.reuse_gap_s.sum) == ([0.5, 2.0], 2.5)
    assert residency.followed == {1: (120.0, 120.0)}


def test_a_block_that_was_never_cached_counts_for_nothing() -> None:
    pool, clock, residency = make(2)
    for _ in range(5):
        pool.free(pool.get_new_blocks(1))
        clock.advance_to(clock() + 1.0)
    assert values(residency.histograms.lifetime_s) == []
    assert len(residency.followed) == 1


def test_a_block_that_came_back_unsampled_is_not_followed_any_more() -> None:
    pool, clock, residency = make(2, one_in=2)
    pool.free(pool.get_new_blocks(1))
    clock.advance_to(200.0)
    pool.free([cached_block(pool, b"a")])
    pool.reset_cache()
    assert values(residency.histograms.lifetime_s) == []


def test_forgotten_and_reset_blocks_are_evicted() -> None:
    pool, clock, residency = make(8)
    ids = [cached_block(pool, bytes([index])) for index in range(4)]
    clock.advance_to(100.19)
    pool.forget(ids[:1])
    pool.free(ids)
    assert len(values(residency.histograms.lifetime_s)) == 1
    assert pool.reset_cache()
    assert values(residency.histograms.lifetime_s) == [0.2] * 4


@pytest.mark.parametrize("batch", [1, 3, 100, 250])
def test_one_in_a_hundred_is_followed_whatever_the_batches(batch: int) -> None:
    pool, _, residency = make(10_001, one_in=100)
    ids: list[int] = []
    while pool.num_free >= batch:
        ids += pool.get_new_blocks(batch)
    assert sorted(residency.followed) == ids[::100]


def test_values_fall_into_their_buckets() -> None:
    pool, clock, residency = make(2)
    for bound in BLOCK_S:
        cached_block(pool, b"x")
        clock.advance_to(clock() + bound * 0.999)
        pool.forget([1])
        pool.free([1])
    cached_block(pool, b"x")
    clock.advance_to(clock() + 10 * BLOCK_S[-1])
    pool.forget([1])
    assert values(residency.histograms.lifetime_s) == [*BLOCK_S, float("inf")]


def test_several_observers_hear_the_same() -> None:
    pool, _, first = make()
    second = Residency(pool, VirtualClock(), 1)
    assert len(pool.observers) == 2
    block_id = cached_block(pool, b"a")
    pool.touch([block_id])
    pool.free([block_id, block_id])
    pool.reset_cache()
    for residency in (first, second):
        seen = residency.histograms
        assert (len(values(seen.lifetime_s)), len(values(seen.reuse_gap_s))) == (1, 1)


# ---- in an engine


def test_blocks_are_followed_from_allocation_to_eviction_where_asked_for() -> None:
    bench = Bench(num_blocks=9, kv_cache_metrics=True, kv_cache_metrics_sample=1)
    for name, start in (("a", 0), ("again", 0), ("other", 20)):  # the last one needs the blocks of the first
        bench.add(name, list(range(start, start + 28)), 1)
        bench.drain()
    blocks = bench.stats.blocks
    assert blocks is not None
    assert count(blocks.reuse_gap_s) == 7
    assert blocks.reuse_gap_s.sum == pytest.approx(7 * 2.0)
    assert count(blocks.lifetime_s) == count(blocks.idle_before_evict_s) > 0
    assert blocks.lifetime_s.sum > blocks.idle_before_evict_s.sum


def test_no_block_is_followed_unless_asked_for() -> None:
    bench = Bench()
    assert bench.stats.blocks is None
    assert bench.core.kv.pool.observers == [bench.core.kv.part(KVBlocks).tails]
