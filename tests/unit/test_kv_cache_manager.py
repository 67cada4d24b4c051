"""Admission, sharing and growth, with the founding documents' test vectors."""

import pytest

from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import Growth
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.verdict import Verdict, admission
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime.prefix_hash import PrefixHasher


def make(num_blocks: int = 11, block_size: int = 4, watermark: float = 0.0, caching: bool = True) -> KVCacheManager:
    blocks = KVBlocks(BlockPool(num_blocks, caching), make_groups([None], block_size), block_size, watermark=watermark)
    return KVCacheManager([blocks], PrefixHasher(block_size, "seed"), blocks.counters)


def request(kv: KVCacheManager, tokens: list[int], name: str = "r") -> Sequence:
    made = Request(Generate(name, pack_tokens(tokens), SamplingParams()), b"client", 10**6, frozenset()).sequences[0]
    kv.register(made)
    return made


def admit(kv: KVCacheManager, tokens: list[int]) -> Sequence:
    made = request(kv, tokens)
    kv.admit(made, kv.find_cached(made), len(tokens))
    return made


@pytest.mark.parametrize(
    ("required", "free", "verdict"),
    [(100, 100, Verdict.NEVER), (99, 100, Verdict.OK), (50, 50, Verdict.LATER), (50, 51, Verdict.OK)],
)
def test_admission_vectors(required: int, free: int, verdict: Verdict) -> None:
    assert admission(total=100, free=free, required=required, watermark=1).verdict is verdict


@pytest.mark.parametrize(("num_blocks", "blocks"), [(1000, 10), (99, 0)])
def test_watermark_is_truncated(num_blocks: int, blocks: int) -> None:
    assert make(num_blocks, watermark=0.01).watermark_blocks == blocks


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (9, 3)])
def test_tokens_are_cut_into_blocks(num_tokens: int, blocks: int) -> None:
    kv = make()
    assert len(admit(kv, list(range(num_tokens))).tables[0].ids) == blocks


def test_full_tail_needs_a_new_block_for_the_next_token() -> None:
    kv = make(block_size=16)
    made = admit(kv, list(range(16)))
    assert made.num_slots == 16
    assert kv.grow(made, 17) == Growth([[2]], [])


def test_grow_changes_nothing_when_blocks_are_short() -> None:
    kv = make(num_blocks=3)
    made = admit(kv, list(range(8)))
    assert kv.grow(made, 9) is None
    assert (made.num_slots, kv.pool.num_free) == (8, 0)
    kv.check_integrity([made])


def test_whole_prompt_hit_computes_one_token_and_writes_none() -> None:
    kv = make(num_blocks=9, block_size=16)
    first = admit(kv, list(range(32)))
    kv.cache_blocks(first, 32)
    second = admit(kv, list(range(32)))
    assert (second.num_computed, second.num_cached) == (31, 32)
    assert second.tables[0].ids == first.tables[0].ids
    assert kv.pool.num_used == 2


def test_partial_hit_shares_only_full_equal_blocks() -> None:
    kv = make()
    first = admit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    kv.cache_blocks(first, 9)
    second = admit(kv, [1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert (second.num_computed, second.num_cached) == (4, 4)
    assert second.tables[0].ids[0] == first.tables[0].ids[0]
    assert second.tables[0].ids[1] != first.tables[0].ids[1]


def test_equal_block_after_another_prefix_is_no_hit() -> None:
    kv = make()
    kv.cache_blocks(admit(kv, [1, 2, 3, 4, 5, 6, 7, 8]), 8)
    assert kv.find_cached(request(kv, [9, 9, 9, 9, 5, 6, 7, 8])).num_tokens == 0


def test_released_blocks_stay_findable_until_reused() -> None:
    kv = make(num_blocks=4)
    first = admit(kv, list(range(8)))
    kv.cache_blocks(first, 8)
    kv.release(first)
    assert kv.pool.num_used == 0
    assert kv.find_cached(request(kv, list(range(8)))).num_tokens == 8
    admit(kv, [50] * 12)
    assert kv.find_cached(request(kv, list(range(8)))).num_tokens == 0


def test_forgotten_blocks_are_not_found() -> None:
    kv = make()
    first = admit(kv, list(range(8)))
    kv.cache_blocks(first, 8)
    kv.release(first, forget=True)
    assert kv.find_cached(request(kv, list(range(8)))).num_tokens == 0


def test_revived_blocks_count_against_the_free_ones() -> None:
    kv = make(num_blocks=5)
    first = admit(kv, list(range(8)))
    kv.cache_blocks(first, 8)
    kv.release(first)
    again = request(kv, list(range(12)))
    verdict = kv.admission(again, kv.find_cached(again), 100)
    assert (verdict.required, verdict.free, verdict.verdict) == (3, 4, Verdict.OK)


def test_a_lookup_is_remembered_until_more_of_the_prefix_is_cached() -> None:
    kv = make(num_blocks=5)
    first = admit(kv, list(range(12)))
    kv.cache_blocks(first, 4)
    second = request(kv, list(range(12)))
    hit = kv.find_cached(second)
    verdict = kv.admission(second, hit, 100)
    assert (hit.num_tokens, verdict.verdict) == (4, Verdict.LATER)
    kv.remember(second, hit, verdict)
    known = kv.recall(second)
    assert known is not None
    assert (known.num_cached, known.admission) == (4, verdict)
    kv.cache_blocks(first, 8)
    assert kv.recall(second) is None
    assert kv.find_cached(second).num_tokens == 8


def test_a_remembered_verdict_is_asked_again_when_blocks_are_free() -> None:
    kv = make(num_blocks=5)
    first = admit(kv, list(range(12)))
    second = request(kv, [50] * 12)
    hit = kv.find_cached(second)
    kv.remember(second, hit, kv.admission(second, hit, 100))
    known = kv.recall(second)
    assert known is not None
    assert known.admission.verdict is Verdict.LATER
    kv.release(first)
    known = kv.recall(second)
    assert known is not None
    assert known.admission.verdict is Verdict.OK


def test_without_caching_nothing_is_hashed() -> None:
    kv = make(caching=False)
    first = admit(kv, list(range(8)))
    kv.cache_blocks(first, 8)
    assert first.block_hashes == []
    assert kv.find_cached(request(kv, list(range(8)))).num_tokens == 0


def test_hashes_depend_on_seed_and_extra_keys() -> None:
    tokens = memoryview(pack_tokens([1, 2, 3, 4]))

    def digest(seed: str | None, *extra: str) -> bytes:
        hasher, hashes = PrefixHasher(4, seed), list[bytes]()
        hasher.extend(hashes, hasher.root(extra), tokens, 4)
        return hashes[0]

    assert digest("a") == digest("a")
    distinct = [
        digest("a"),
        digest("b"),
        digest("a", "x"),
        digest("a", "ab", "c"),
        digest("a", "a", "bc"),
        digest(None),
    ]
    assert len(set(distinct)) == len(distinct)
    assert digest(None) != digest(None)


def test_hashing_in_pieces_equals_hashing_at_once() -> None:
    hasher = PrefixHasher(4, "s")
    tokens = memoryview(pack_tokens(range(19)))
    pieces, whole = list[bytes](), list[bytes]()
    for end in (3, 4, 9, 16, 19):
        hasher.extend(pieces, hasher.root(), tokens, end)
    hasher.extend(whole, hasher.root(), tokens, 19)
    assert pieces == whole
    assert len(whole) == 4
