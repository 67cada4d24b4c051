"""Moves between the tiers: the limit of a step, moves that wait, and their order."""

from typing import Any

import pytest

from tests.scheduler_rig import VOCAB, Rig, expected
from vllm_lite.engine.scheduling.policy import Priority
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import NOT_FINITE

PROMPT = [number % VOCAB for number in range(40)]


def pressed(max_swap_blocks: int, num_host_blocks: int = 100, **options: Any) -> Rig:
    """Two sequences of which one is preempted, ten blocks or more, as soon as both have grown."""
    rig = Rig(
        24,
        num_host_blocks=num_host_blocks,
        max_swap_blocks=max_swap_blocks,
        preemption="swap",
        max_num_batched_tokens=100,
        **options,
    )
    rig.add("a", PROMPT, max_tokens=30)
    rig.add("b", PROMPT[::-1], max_tokens=30)
    return rig


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_swap_blocks", [2, 5, 11])
def test_a_sequence_of_more_blocks_than_a_step_moves_is_swapped_all_the_same(max_swap_blocks: int, depth: int) -> None:
    rig = pressed(max_swap_blocks, caching=False, depth=depth)
    rig.drain()
    counters = rig.scheduler.counters
    assert counters.swaps == counters.preemptions > 0
    assert rig.worker.num_written == 2 * (40 + 29), "nothing is computed twice"
    assert rig.output("a") == expected(PROMPT, 30)
    assert rig.output("b") == expected(PROMPT[::-1], 30)


def first_swapped(rig: Rig) -> Sequence:
    while not (swapped := [sequence for sequence in rig.scheduler.waiting if sequence.status is Status.SWAPPED]):
        rig.step()
    return swapped[0]


def test_blocks_that_cannot_move_yet_stay_until_needed() -> None:
    rig = pressed(3, caching=False)
    sequence = first_swapped(rig)
    num_blocks = len(sequence.tables[0].ids)
    assert rig.kv.counters.swapped_out_blocks == 3
    assert [bool(block_id) for block_id in sequence.tables[0].ids] == [True] * (num_blocks - 3) + [False] * 3
    rig.drain()
    assert rig.kv.counters.swapped_out_blocks == rig.kv.counters.swapped_in_blocks < num_blocks
    assert rig.scheduler.counters.preemptions == 1, "parked blocks are taken before another is preempted"


def test_without_room_on_the_host_for_the_rest_it_is_computed_again() -> None:
    """While it waits, half on the host, something else takes the host's last room."""
    rig = pressed(3, num_host_blocks=14)
    sequence = first_swapped(rig)
    assert rig.host is not None
    rig.host.reserve([None] * rig.host.pool.num_free)
    rig.blocks.swapping.begin_step()
    while rig.kv.reclaim():
        pass
    assert (sequence.status, sequence.host_ids, sequence.num_computed) == (Status.PREEMPTED, None, 0)
    rig.host.pool.free([index for index, block in enumerate(rig.host.pool.blocks) if block.ref_count])
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 30)
    assert rig.output("b") == expected(PROMPT[::-1], 30)


def test_without_running_sequences_the_first_takes_blocks_of_later_ones() -> None:
    """A waiting sequence has a part of the pool, without which the one before it does not fit."""
    rig = pressed(3, policy=Priority())
    sequence = first_swapped(rig)
    held = len(sequence.tables[0].ids) - 3
    rig.abort("a")
    rig.add("c", [1, 2, 3] * 26, max_tokens=5, priority=-1)
    assert rig.kv.pool.num_free < 20 <= rig.kv.pool.num_free + held
    rig.drain()
    assert [name for name, _ in rig.reasons] == ["c", "b"]
    assert rig.output("c") == expected([1, 2, 3] * 26, 5)
    assert rig.output("b") == expected(PROMPT[::-1], 30)


def test_demotions_do_not_starve_a_swapped_sequence() -> None:
    """Beside a swapped sequence others grow by two blocks a step, into blocks that are cached. With room for it on the
    device the swapped one is back after the steps that its blocks take, and as many of those that make way for it."""
    rig = Rig(131, 1, num_host_blocks=400, max_swap_blocks=3, preemption="swap", max_num_batched_tokens=200)
    rig.add("long", [1, 2, 3, 4, 5], max_tokens=80)
    rig.add("longer", [5, 4, 3, 2, 1], max_tokens=80)
    rig.add("leaves", [VOCAB - 1] * 80, max_tokens=10)
    rig.add("swapped", PROMPT[:20], max_tokens=20)
    first_swapped(rig)
    while ("leaves", 0) not in rig.reasons:
        rig.step()
    sequence = next(iter(rig.scheduler.waiting))
    num_steps, demoted = 0, rig.kv.counters.demoted_blocks
    while sequence.status is not Status.RUNNING:
        rig.step()
        num_steps += 1
    assert num_steps <= -(-2 * sequence.num_tokens // 3) + 1
    for _ in range(10):
        rig.step()
    assert rig.kv.counters.demoted_blocks > demoted, "the test is about steps that demote"
    rig.drain()
    assert rig.output("swapped") == expected(PROMPT[:20], 20)


@pytest.mark.parametrize("max_swap_blocks", [1, 100])
def test_beams_are_not_preempted_for_a_sequence_that_is_being_loaded(max_swap_blocks: int) -> None:
    """They wait for it, and nothing is computed in its steps."""
    rig = Rig(10, num_host_blocks=30, max_swap_blocks=max_swap_blocks, preemption="swap", caching=False)
    rig.add("other", [2, 7, 1, 8], max_tokens=12)
    rig.add("a", [3, 1, 4, 1, 5, 9, 2], 10, frozenset((7, 8, 9, 10)), n=4, use_beam_search=True)
    rig.drain()
    assert 0 < rig.scheduler.counters.preemptions <= 2


def test_no_second_sequence_is_loaded_in_parts() -> None:
    """A second one would take the blocks for which the first waits, and would give them back and take them again in the
    same step."""
    rig = Rig(30, num_host_blocks=100, max_num_batched_tokens=200)
    rig.add("first", PROMPT, max_tokens=1)
    rig.drain()
    rig.add("other", [7, 3] * 55, max_tokens=1)
    rig.drain()
    assert rig.kv.counters.demoted_blocks > 3
    rig.add("stream", [5, 3] * 30, max_tokens=20)
    rig.step()
    rig.blocks.swapping.max_blocks = rig.max_swap_blocks = 3
    rig.add("head", [9, 3] * 35, max_tokens=2)
    rig.add("behind", [*PROMPT, 1], max_tokens=2)
    for _ in range(5):
        rig.step()
        assert not rig.blocks.swapping.parked
    assert "stream" in rig.scheduler.requests
    rig.drain()
    assert rig.output("behind") == expected([*PROMPT, 1], 2)


def test_blocks_still_on_the_device_are_not_loaded() -> None:
    rig = Rig(40, num_host_blocks=40, preemption="swap", max_num_batched_tokens=64, max_swap_blocks=6)
    sequence = rig.add("a", PROMPT[:18], max_tokens=5).sequences[0]
    rig.step()
    assert rig.kv.swap_out(sequence)
    assert rig.kv.counters.swapped_out_blocks == 5
    assert rig.kv.swap_in(sequence, 19), "the step may move one more"
    assert rig.kv.counters.swapped_in_blocks == 1, "its last block is not full, so nobody finds it"
    rig.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_hit_on_the_host_may_exceed_a_steps_moves(depth: int) -> None:
    rig = Rig(26, 1, num_host_blocks=100, max_swap_blocks=4, depth=depth, max_num_batched_tokens=64)
    rig.add("a", PROMPT[:20], max_tokens=1)
    rig.drain()
    rig.add("grows", [VOCAB - 1], max_tokens=24)  # evicts a block a step
    rig.drain()
    assert rig.kv.counters.demoted_blocks == 19
    written = rig.worker.num_written
    again = rig.add("again", PROMPT[:20], max_tokens=1)
    rig.drain()
    assert again.num_cached_at_start == 19
    assert rig.worker.num_written == written
    assert rig.kv.counters.promoted_blocks == 19
    assert rig.scheduler.counters.host_hits == 19, "counted once, however many steps it takes"
    assert rig.output("again") == rig.output("a")


@pytest.mark.parametrize(
    ("num_host_blocks", "max_swap_blocks", "kept"), [(50, 8, 20), (5, 8, 5), (5, 2, 5), (50, 100, 20)]
)
def test_the_prefix_of_evicted_blocks_is_demoted(num_host_blocks: int, max_swap_blocks: int, kept: int) -> None:
    rig = Rig(22, 2, num_host_blocks=num_host_blocks, max_swap_blocks=max_swap_blocks, max_num_batched_tokens=64)
    rig.add("a", PROMPT, max_tokens=1)
    rig.drain()
    rig.add("b", [VOCAB - 1] * 41, max_tokens=1)
    rig.drain()
    assert rig.kv.counters.demoted_blocks == kept
    again = rig.add("again", PROMPT, max_tokens=1)
    rig.drain()
    assert again.num_cached_at_start == min(2 * kept, 39)


def test_a_host_that_is_full_drops_tails_first() -> None:
    """The second half of a prompt is demoted in one admission, the first in another; there is room for three parts of
    four."""
    rig = Rig(22, 2, num_host_blocks=15, max_num_batched_tokens=64)
    rig.add("a", PROMPT, max_tokens=1)
    rig.drain()
    for name in ("b", "c"):
        rig.add(name, [VOCAB - 1 - len(rig.reasons)] * 21, max_tokens=1)
        rig.drain()
    again = rig.add("again", PROMPT, max_tokens=1)
    rig.drain()
    assert again.num_cached_at_start == 30


def test_content_that_is_still_on_the_device_is_not_demoted() -> None:
    rig = Rig(12, num_host_blocks=20, max_num_batched_tokens=64)
    for name in ("a", "b"):  # both miss, so the first two blocks are there twice
        rig.add(name, PROMPT[:8], max_tokens=2)
        rig.scheduler.kv.pool.enable_caching = name == "b"
    rig.scheduler.kv.pool.enable_caching = True
    rig.drain()
    rig.blocks.swapping._demote([(1, key) for key in list(rig.kv.pool.cached)])
    assert rig.kv.counters.demoted_blocks == 0


def test_blocks_on_the_host_that_are_taken_back_into_use_need_room_there() -> None:
    """Two of three blocks are on the host as cached copies: they are two of the host's free blocks, and the third
    needs one more."""
    rig = Rig(12, num_host_blocks=2, preemption="swap", max_num_batched_tokens=64)
    sequence = rig.add("a", PROMPT[:12], max_tokens=5).sequences[0]
    rig.step()
    host = rig.host
    assert host is not None
    host.unpin(host.reserve([key + rig.blocks.groups[0].key for key in sequence.block_hashes[:2]]))
    used = rig.kv.pool.num_used
    assert not rig.kv.swap_out(sequence)
    assert (sequence.host_ids, rig.kv.pool.num_used, host.pool.num_used) == (None, used, 0)
    rig.drain()


@pytest.mark.parametrize("is_swapped", [True, False])
def test_a_corrupted_request_is_not_found_on_the_host_either(is_swapped: bool) -> None:
    rig = pressed(100)
    sequence = first_swapped(rig)
    name = sequence.request.request_id
    prompt = sequence.tokens[:40].tolist()
    if not is_swapped:
        rig.abort("a")
        rig.step()
        assert sequence.status is Status.RUNNING
    assert rig.host is not None
    assert rig.host.pool.num_cached >= 10
    rig.record(rig.scheduler._results._fail(sequence, NOT_FINITE))
    again = rig.add("again", prompt, max_tokens=1)
    rig.drain()
    assert rig.reasons[name, 0] == "error"
    assert again.num_cached_at_start == 0
