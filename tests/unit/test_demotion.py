"""Blocks that a waiting sequence evicts are all demoted, over as many steps as that takes, and none of them stalls
longer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cached_contents import CachedContents
from tests.examples import examples
from tests.scheduler_rig import VOCAB, Rig, expected
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Status
from vllm_lite.protocol.step import BlockOp

PROMPT = [number % VOCAB for number in range(40)]


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def ask(rig: Rig, name: str, prompt: list[int]) -> Request:
    """Have one request computed, alone."""
    request = rig.add(name, prompt, max_tokens=1)
    rig.drain()
    return request


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 2000])
def test_two_prompts_in_turn_on_a_pool_that_holds_one_are_found_whole(budget: int, depth: int) -> None:
    rig = Rig(83, 16, num_host_blocks=170, max_swap_blocks=25, max_num_batched_tokens=budget, depth=depth)
    both = prompts(1200, 1200)
    for turn in range(3):
        for number, prompt in enumerate(both):
            request = ask(rig, f"{turn}-{number}", prompt)
            assert request.num_cached_at_start == (1199 if turn else 0)
    assert rig.kv.counters.demoted_blocks < 150, "each is moved out once"


@pytest.mark.parametrize("max_swap_blocks", [100, 7], ids=["in one step", "parked meanwhile"])
def test_a_hit_on_the_host_is_reported_once_with_its_tokens(max_swap_blocks: int) -> None:
    rig = Rig(83, 16, num_host_blocks=170, max_swap_blocks=max_swap_blocks, max_num_batched_tokens=2000)
    both = prompts(1200, 1200)
    for number, prompt in enumerate(both):
        ask(rig, f"first-{number}", prompt)
    assert not promoted(rig), "nothing was found yet"
    before = rig.kv.counters.promoted_blocks
    assert ask(rig, "again", both[0]).num_cached_at_start == 1199
    (tokens,) = promoted(rig)
    assert tokens == 16 * (rig.kv.counters.promoted_blocks - before) > 0
    assert ask(rig, "at once", both[0]).num_cached_at_start == 1199
    assert promoted(rig) == [tokens], "now it is on the device"


def promoted(rig: Rig) -> list[int]:
    """Tokens of each hit on the host."""
    return [int(numbers["tokens"]) for code, numbers in rig.decisions if code == "promoted"]


@settings(max_examples=examples(150))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    limit=st.integers(2, 40),
    block_size=st.sampled_from([1, 2, 4]),
    spare=st.integers(1, 40),
    depth=st.sampled_from([1, 2]),
    has_more=st.booleans(),
)
def test_nothing_is_lost_that_the_host_has_room_for(
    lengths: list[int], limit: int, block_size: int, spare: int, depth: int, has_more: bool
) -> None:
    """Prompts of any lengths, one after the other and all of them again, also with something new behind them."""
    blocks = [-(-(length + 2) // block_size) for length in lengths]
    rig = Rig(
        max(blocks) + 1 + spare,
        block_size,
        num_host_blocks=2 * sum(blocks) + 1,
        max_swap_blocks=limit,
        depth=depth,
        max_num_batched_tokens=17,
    )
    contents = CachedContents(rig.kv)
    all_prompts = prompts(*lengths)
    for turn in range(2):
        for number, prompt in enumerate(all_prompts):
            more = [1] * min(turn and has_more, rig.scheduler.max_len - 1 - len(prompt))
            request = ask(rig, f"{turn}-{number}", [*prompt, *more])
            contents.check(rig.worker, ())
            if turn:
                whole = len(prompt) // block_size * block_size
                assert request.num_cached_at_start == min(whole, len(prompt) + len(more) - 1)


def test_a_prompt_that_waits_for_demotions_reports_it_and_holds_no_blocks() -> None:
    rig = Rig(22, 2, num_host_blocks=50, max_swap_blocks=8, max_num_batched_tokens=64)
    ask(rig, "a", PROMPT)
    rig.decisions.clear()
    request = rig.add("b", [VOCAB - 1] * 41, max_tokens=1)
    for num_demoted in (8, 16):
        rig.step()
        assert rig.kv.counters.demoted_blocks == num_demoted
        assert rig.kv.pool.num_used == 0
        assert rig.decisions.pop()[0] == "waits_for_swap"
        (state,) = describe(rig.scheduler, [request], 0.0)
        assert (state.admission.verdict, state.admission.reason) == ("OK", "waits_for_swap")
    sequence = request.sequences[0]
    rig.step()
    assert sequence.num_demoting == 0
    assert rig.kv.counters.demoted_blocks == 20
    assert rig.reasons["b", 0] == "length"


def test_a_prompt_is_admitted_although_others_evict_kept_blocks() -> None:
    """Three streams evict three cached blocks a step, which is all that it may move: nothing is left for the prompt."""
    rig = Rig(101, 1, num_host_blocks=400, max_swap_blocks=3, max_num_batched_tokens=200)
    ask(rig, "old", prompts(98)[0])
    for number in range(3):
        rig.add(f"stream{number}", [number, 1, 2], max_tokens=40)
    rig.step()
    waiting = rig.add("new", [9] * 12, max_tokens=2).sequences[0]
    num_steps = 0
    while waiting.status is Status.WAITING:
        rig.step()
        num_steps += 1
    assert 12 // 3 < num_steps <= 12 // 3 + 2
    assert len(rig.scheduler.running) == 4, "the test is about streams that go on"
    rig.drain()
    assert rig.output("new") == expected([9] * 12, 2)


def test_a_prompt_does_not_evict_its_own_prefix() -> None:
    rig = Rig(41, 1, num_host_blocks=100, max_swap_blocks=8, max_num_batched_tokens=64)
    old, other = prompts(20, 18)
    ask(rig, "old", old)
    ask(rig, "other", other)
    request = rig.add("again", [*old[:15], *[VOCAB] * 18], max_tokens=1)  # 18 new blocks; 2 are blank
    moved = set[int]()
    held = set(rig.kv.find_cached(request.sequences[0]).found[0][0])
    assert len(held) == 15
    while rig.scheduler.requests:
        output = rig.scheduler.schedule()
        assert output is not None
        moved |= {src for op, src, _ in output.block_ops if op == BlockOp.SWAP_OUT}
        rig.worker.submit(output)
        while (result := rig.worker.poll()) is not None:
            for item in rig.scheduler.update(result):
                rig.record(item)
    assert request.num_cached_at_start == 15
    assert moved
    assert not moved & held


def test_content_that_stays_in_another_block_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last block of the prompt are there twice, and the first of each pair goes."""
    rig = Rig(42, 1, num_host_blocks=100, max_swap_blocks=4, max_num_batched_tokens=64)
    ask(rig, "a", PROMPT[:20])
    with monkeypatch.context() as patch:
        patch.setattr(rig.kv.pool, "get_cached_block", lambda _key: None)
        ask(rig, "b", PROMPT[:20])
    assert (len(rig.kv.pool.cached), rig.kv.pool.num_cached) == (20, 40)
    rig.add("new", [VOCAB - 1] * 20, max_tokens=1)
    rig.step()
    assert rig.reasons["new", 0] == "length"
    assert rig.kv.counters.demoted_blocks == 0


def test_a_full_host_does_not_delay_admission() -> None:
    """All that it has is pinned by the one that is being loaded: there is nowhere to demote to."""
    rig = Rig(26, 1, num_host_blocks=19, max_swap_blocks=4, max_num_batched_tokens=64)
    ask(rig, "a", PROMPT[:20])
    rig.add("grows", [VOCAB - 1], max_tokens=24)
    rig.drain()
    assert rig.kv.counters.demoted_blocks == 19
    first = rig.scheduler.step
    assert ask(rig, "again", PROMPT[:20]).num_cached_at_start == 19
    assert rig.scheduler.step - first == -(-19 // 4)
    assert rig.kv.counters.demoted_blocks == 19


def test_the_room_of_the_host_is_all_that_is_demoted_in_exchange() -> None:
    """With 22 blocks to load and room for 3 on the host each step moves 5 in and 3 out."""
    rig = Rig(29, 1, num_host_blocks=25, max_swap_blocks=8, max_num_batched_tokens=64)
    ask(rig, "a", PROMPT[:23])
    rig.add("grows", [VOCAB - 1], max_tokens=27)
    rig.drain()
    assert rig.kv.counters.demoted_blocks == 22
    first = rig.scheduler.step
    assert ask(rig, "again", PROMPT[:23]).num_cached_at_start == 22
    assert rig.scheduler.step - first == -(-22 // 5)


def test_no_later_sequence_is_admitted_at_the_cost_of_cached_blocks() -> None:
    """Admission would load three blocks and demote more cached ones than the step's five moves allow, so only a first
    sequence, which may load in parts, is admitted."""
    rig = Rig(13, 1, num_host_blocks=50, max_swap_blocks=5, max_num_batched_tokens=64)
    old, new = prompts(6, 11)
    ask(rig, "old", old)
    ask(rig, "new", new)
    sequence = rig.add("behind", [*old[:4], VOCAB, VOCAB], max_tokens=1).sequences[0]
    rig.kv.begin_step()
    hit, num_demoted = rig.kv.find_cached(sequence), rig.kv.counters.demoted_blocks
    assert [block_id >= 13 for block_id in hit.found[0][0]] == [False, True, True, True]
    assert not rig.kv.may_admit(sequence, hit, 6, in_parts=False)
    assert (sequence.host_ids, rig.kv.pool.num_used) == (None, 0)
    assert rig.kv.counters.demoted_blocks - num_demoted == 2, "three of the five moves are for loading"
    rig.kv.begin_step()
    assert rig.kv.may_admit(sequence, hit, 6, in_parts=True)
    assert rig.kv.admit(sequence, hit, 6), "now it may be the first, and loads in parts"


@given(
    num_blocks=st.integers(1, 8),
    pinned=st.sets(st.integers(0, 7)),
    cached=st.sets(st.integers(0, 7)),
    keys=st.lists(st.integers(0, 9), unique=True),
)
def test_places_are_counted_as_they_are_found(
    num_blocks: int, pinned: set[int], cached: set[int], keys: list[int]
) -> None:
    host = HostTier(num_blocks, 100)
    ids = host.reserve([bytes((number,)) for number in sorted(cached)[:num_blocks]])
    host.unpin([block_id for block_id in ids if block_id - 100 not in pinned])
    wanted = [bytes((number,)) for number in keys]
    found = {key: block_id for key in wanted if (block_id := host.find(key)) is not None}
    num_held = sum(not host.pool.is_free(block_id - 100) for block_id in found.values())
    fits = len(wanted) - num_held <= host.pool.num_free
    num_places = host.num_places(wanted)
    assert num_places == len(host.demote(wanted, 100))
    host.pool.check_integrity()
    if fits:
        assert all(host.find(key) is not None for key in wanted)
        assert num_places == len(wanted) - len(found)


def test_demotions_do_not_evict_blocks_about_to_be_loaded() -> None:
    """The host is full, and its oldest blocks are the waiting sequence's prefix; demotions must not evict them."""
    rig = Rig(26, 1, num_host_blocks=10, max_swap_blocks=6, max_num_batched_tokens=64)
    host = rig.host
    assert host is not None
    ask(rig, "cached", PROMPT[:24])
    on_host = host.reserve([bytes((number,)) for number in range(10)])
    host.unpin(on_host)
    sequence = rig.add("waits", [VOCAB - 1] * 20).sequences[0]
    rig.kv.begin_step()
    assert not rig.blocks.swapping.may_take(sequence, 20, on_host[-4:])
    assert rig.kv.counters.demoted_blocks == 2, "four of the six moves are for loading"
    assert [host.find(bytes((number,))) for number in range(6, 10)] == on_host[-4:]
    rig.kv.take_ops()
    rig.abort("waits")
