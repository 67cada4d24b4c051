"""BlockPool, block ids asserted where their order is specified (founding documents, test vectors)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.table import BlockTable
from vllm_lite.errors import OutOfBlocks


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.get_new_blocks(3) == [1, 2, 3]
    with pytest.raises(OutOfBlocks, match="Cannot get 1 free blocks from the pool: only 0 are free"):
        pool.get_new_blocks(1)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(6)
    with pytest.raises(ValueError, match="Cannot get 6 free blocks"):
        pool.get_new_blocks(6)
    assert pool.num_free == 5
    assert pool.get_new_blocks(5) == [1, 2, 3, 4, 5]


def test_a_sequence_is_freed_tail_first() -> None:
    pool = BlockPool(5)
    table = BlockTable(pool)
    assert table.append(4) == [1, 2, 3, 4]
    table.free()
    assert pool.get_new_blocks(4) == [4, 3, 2, 1]


def test_double_free_names_the_block_and_changes_nothing() -> None:
    pool = BlockPool(4)
    ids = pool.get_new_blocks(2)
    pool.free(ids)
    with pytest.raises(ValueError, match=r"Double free! Block\(1, ref_count=0\) is already freed\."):
        pool.free([1])
    pool.check_integrity([])


def test_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(4)
    parent = BlockTable(pool)
    parent.append(2)
    child = parent.fork(2)
    parent.free()
    assert pool.num_free == 1
    child.free()
    assert pool.num_free == 3
    pool.check_integrity([])


def test_usage_counts_evictable_blocks_as_free() -> None:
    pool = BlockPool(11)
    ids = pool.get_new_blocks(5)
    assert pool.num_used == pool.num_usable // 2
    pool.cache_block(ids[0], b"h")
    pool.free(ids)
    assert (pool.num_used, pool.num_cached) == (0, 1)


def test_hit_revives_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    ids = pool.get_new_blocks(4)
    pool.cache_block(2, b"two")
    pool.free(ids)
    found = pool.get_cached_block(b"two")
    assert found == 2
    pool.touch([found])
    assert pool.get_new_blocks(3) == [1, 3, 4]


def test_hit_while_in_use_leaves_the_free_list_alone() -> None:
    pool = BlockPool(5)
    pool.get_new_blocks(2)
    pool.touch([1])
    assert pool.blocks[1].ref_count == 2
    assert pool.num_free == 2


def test_eviction_is_least_recently_used_and_tells_the_hook() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(4)
    pool.on_evict = evicted.extend
    ids = pool.get_new_blocks(3)
    for block_id in ids:
        pool.cache_block(block_id, b"%d" % block_id)
    pool.free([3, 1, 2])
    assert pool.get_new_blocks(2) == [3, 1]
    assert evicted == [(3, b"3"), (1, b"1")]
    assert pool.get_cached_block(b"3") is None
    assert pool.get_cached_block(b"2") == 2


def test_duplicates_of_one_content_are_kept_apart() -> None:
    pool = BlockPool(5)
    first, second = pool.get_new_blocks(2)
    pool.cache_block(first, b"h")
    pool.cache_block(second, b"h")
    assert pool.num_cached == 2
    pool.free([first])
    pool.get_new_blocks(3)  # evicts `first`
    assert pool.get_cached_block(b"h") == second
    pool.check_integrity()


def test_caching_a_block_twice_is_refused() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    pool.cache_block(1, b"h")
    with pytest.raises(ValueError, match="is cached already"):
        pool.cache_block(1, b"h")


def test_reset_also_forgets_referenced_blocks() -> None:
    pool = BlockPool(5)
    held = pool.get_new_blocks(2)
    left = pool.get_new_blocks(1)
    for block_id, block_hash in ((1, b"h"), (2, b"h"), (3, b"left")):
        pool.cache_block(block_id, block_hash)
    pool.free(left)
    assert pool.reset_cache() == 3
    assert pool.num_cached == 0
    assert pool.get_cached_block(b"h") is pool.get_cached_block(b"left") is None
    pool.check_integrity([held])  # the holder of a block still has it
    pool.cache_block(1, b"again")
    assert pool.get_cached_block(b"again") == 1
    assert pool.reset_cache() == 1
    assert pool.reset_cache() == 0


def test_a_pool_without_room_for_a_real_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


@pytest.mark.parametrize("block_id", [-1, 4, 10**9])
def test_an_id_that_no_block_has_is_refused_by_name(block_id: int) -> None:
    pool = BlockPool(4)
    held = pool.get_new_blocks(3)  # -1 would be the last of them
    error = f"block {block_id} does not exist; the pool has blocks 0 to 3"
    calls: list[Callable[[], object]] = [
        lambda: pool.free([1, block_id, 2]),
        lambda: pool.touch([1, block_id, 2]),
        lambda: pool.touch([1, block_id, 2]),
        lambda: pool.cache_block(block_id, b"h"),
        lambda: pool.forget([block_id]),
        lambda: pool.is_free(block_id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=error):
            call()
    pool.check_integrity([held, [1]])  # freed once and touched twice; the ids after the unknown one are unchanged


def test_counting_cached_blocks_looks_at_none_of_them() -> None:
    """The engine's loop answers /metrics with it, however many blocks there are."""

    class Index(dict[bytes, Any]):
        def values(self) -> Any:
            raise AssertionError("the index was read")

    pool = BlockPool(5)
    for block_id in pool.get_new_blocks(3):
        pool.cache_block(block_id, b"%d" % (block_id // 2))
    pool.cached = Index(pool.cached)
    assert pool.num_cached == 3


@pytest.mark.parametrize("breakage", ["ref", "null", "index", "count"])
def test_check_integrity_sees_damage(breakage: str) -> None:
    pool = BlockPool(4)
    table = pool.get_new_blocks(2)
    pool.cache_block(1, b"h")
    pool.check_integrity([table])
    if breakage == "ref":
        pool.blocks[1].ref_count = 2
    elif breakage == "null":
        pool.blocks[0].ref_count = 1
    elif breakage == "count":
        pool.num_cached += 1
    else:
        pool.blocks[1].block_hash = b"other"
    with pytest.raises(RuntimeError, match="inconsistent"):
        pool.check_integrity([table])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a naive model: a list of free ids in eviction order, counts and hashes in dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.free = list(range(1, 9))
        self.refs = dict.fromkeys(range(1, 9), 0)
        self.hashes: dict[int, bytes] = {}
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.get_new_blocks(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert self.pool.get_new_blocks(count) == taken
        for block_id in taken:
            self.refs[block_id] = 1
            self.hashes.pop(block_id, None)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))
        for block_id in reversed(table):
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                self.free.append(block_id)

    @rule(content=st.sampled_from([b"a", b"b", b"c"]))
    def hit(self, content: bytes) -> None:
        found = self.pool.get_cached_block(content)
        holders = [block_id for block_id, block_hash in self.hashes.items() if block_hash == content]
        assert (found in holders) if holders else found is None
        if found is not None:
            self.pool.touch([found])
            if not self.refs[found]:
                self.free.remove(found)
            self.refs[found] += 1
            self.tables.append([found])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c"]))
    def cache(self, data: st.DataObject, content: bytes) -> None:
        block_id = data.draw(st.sampled_from([block_id for table in self.tables for block_id in table]))
        if block_id not in self.hashes:
            self.pool.cache_block(block_id, content)
            self.hashes[block_id] = content

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.hashes)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60)
