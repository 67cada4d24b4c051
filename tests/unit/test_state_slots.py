"""States of recurrent layers: the positions at which they are saved, the state from which a later prompt continues, and
the cost of an evicted one."""

from typing import Any

import pytest

from tests.cached_contents import CachedContents
from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.states.histories import History, StateHistories
from vllm_lite.engine.states.host import HostStates
from vllm_lite.engine.states.place import NO_SLOT
from vllm_lite.engine.states.slots import LAST_MARKS
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams

PROMPT = list(range(1, 31))


WITH_KV_OR_WITHOUT = pytest.mark.parametrize("windows", [(None,), ()], ids=["beside KV", "alone"])


def rig_with(num_slots: int, windows: tuple[int | None, ...] = (None,)) -> Rig:
    return Rig(60, num_state_slots=num_slots, windows=windows, max_num_batched_tokens=64)


def cached(request: Request) -> int:
    assert request.num_cached_at_start is not None
    return request.num_cached_at_start


def run(rig: Rig, name: str, prompt: list[int], marks: tuple[int, ...] = (), max_tokens: int = 6) -> Request:
    request = rig.add(name, prompt, max_tokens, marks=marks)
    rig.drain()
    assert rig.output(name) == expected(prompt, max_tokens)
    return request


@WITH_KV_OR_WITHOUT
def test_the_next_turn_begins_at_the_last_block_that_the_answer_filled(windows: tuple[int | None, ...]) -> None:
    rig = rig_with(20, windows)
    first = run(rig, "first", PROMPT, max_tokens=11)
    assert cached(first) == 0
    tokens = PROMPT + rig.output("first")  # 41, of which 40 are computed
    assert cached(run(rig, "next", [*tokens, 7, 8])) == 40
    assert cached(run(rig, "first again", PROMPT)) == 28


@WITH_KV_OR_WITHOUT
def test_a_state_is_saved_at_marks_and_an_edited_turn_begins_there(windows: tuple[int | None, ...]) -> None:
    rig = rig_with(20, windows)
    run(rig, "first", PROMPT, marks=(5, 13, 22))
    assert cached(run(rig, "edited", [*PROMPT[:23], 40, 41, 42])) == 20
    assert cached(run(rig, "earlier", [*PROMPT[:15], 40, 41, 42])) == 12
    assert cached(run(rig, "other", [*PROMPT[:9], 40])) == 4, "the first mark: a prompt that many chats share"


def test_where_prefixes_part_a_state_is_saved_for_the_third() -> None:
    rig = rig_with(20)
    run(rig, "first", PROMPT)
    second = run(rig, "second", [*PROMPT[:18], 40, 41])
    assert cached(second) == 0, "their KV is there, but no state"
    assert ("state_missing", {"kv": 16, "state": 0}) in rig.decisions
    rig.kv.count()
    assert rig.scheduler.counters.state_missing_tokens == 16
    assert cached(run(rig, "third", [*PROMPT[:18], 42, 43])) == 16


def test_without_the_state_all_is_computed_again() -> None:
    rig = rig_with(4)
    run(rig, "first", PROMPT)
    for number in range(3):
        run(rig, f"other{number}", [30 + number] * 20)
    again = run(rig, "again", PROMPT)
    assert cached(again) == 0
    assert rig.states is not None
    assert rig.states.store.num_evicted


def test_many_marks_do_not_evict_states_of_others() -> None:
    rig = rig_with(40)
    run(rig, "first", PROMPT, marks=tuple(range(2, 31, 2)))
    assert rig.states is not None
    rig.states.begin_step()
    assert rig.states.pool.num_cached == 2 + LAST_MARKS  # the first mark, the last ones, and the state after the answer


def test_chats_in_turns_keep_all_states_that_fit() -> None:
    rig, found = Rig(300, num_state_slots=9, max_num_batched_tokens=64), 0
    prompts = [[number, *PROMPT[:10]] for number in range(8)]
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            found += cached(run(rig, f"{turn}.{number}", prompt)) > 0
            prompt += [*rig.output(f"{turn}.{number}"), 7]
    assert found >= 8, "those of every second chat"


def test_states_that_had_to_go_are_found_on_the_host() -> None:
    rig, found = Rig(300, num_state_slots=6, num_host_states=8, max_num_batched_tokens=64), 0
    prompts = [[number, *PROMPT[:10]] for number in range(8)]
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            found += cached(run(rig, f"{turn}.{number}", prompt)) > 0
            prompt += [*rig.output(f"{turn}.{number}"), 7]
    assert found == 16, "all of them"
    assert "state_loaded" in {code for code, _ in rig.decisions}
    host = rig.states and rig.states.host
    assert host
    assert host.num_demoted >= host.num_promoted > 0


def test_one_slot_is_enough() -> None:
    rig = rig_with(2)
    run(rig, "first", PROMPT)
    rig.add("second", [*PROMPT, 9], 6)
    rig.add("third", PROMPT[:11], 6)
    rig.drain()
    assert rig.output("second") == expected([*PROMPT, 9], 6)
    assert rig.output("third") == expected(PROMPT[:11], 6)
    assert "waits_for_state" in {code for code, _ in rig.decisions}


@pytest.mark.parametrize("num_host_states", [0, 9])
def test_the_state_of_a_sequence_that_is_swapped_out_goes_to_the_host_if_there_is_room(num_host_states: int) -> None:
    rig = Rig(12, num_state_slots=9, num_host_blocks=40, num_host_states=num_host_states, preemption="swap")
    prompts = [[number] * 12 for number in (1, 2, 3)]
    for number, prompt in enumerate(prompts):
        rig.add(f"r{number}", prompt, 20)
    num_pinned, slots = 0, set[int]()
    while rig.scheduler.requests:
        rig.step()
        slots |= {each.state.live for each in rig.scheduler.waiting if each.state is not None}
        if rig.states is not None and rig.states.host is not None:
            num_pinned = max(num_pinned, rig.states.host.num_pinned)
    rig.drain()
    assert rig.scheduler.counters.swaps
    assert (num_pinned > 0) == (num_host_states > 0)
    assert num_host_states == 0 or slots == {NO_SLOT}, "its slot is given back"
    assert all(rig.output(f"r{number}") == expected(prompt, 20) for number, prompt in enumerate(prompts))


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_drafts_in_flight_at_a_preemption_are_not_counted_twice(block_size: int) -> None:
    """Steps overlap, so that a sequence may be preempted while it is not known which of its drafts are right."""
    options = {"num_state_slots": 30, "num_host_blocks": 80, "preemption": "swap", "num_drafts": 3, "depth": 3}
    rig = Rig(48 // block_size, block_size, **options)  # type: ignore[arg-type]
    prompts = [[number] * (6 + number) for number in range(1, 7)]
    for turn, max_tokens in enumerate((20, 5)):
        for number, prompt in enumerate(prompts):
            rig.add(f"{turn}.{number}", prompt, max_tokens)
        rig.drain()
        for number, prompt in enumerate(prompts):
            assert rig.output(f"{turn}.{number}") == expected(prompt, max_tokens)
            prompt += [*rig.output(f"{turn}.{number}"), 9]
    assert rig.scheduler.counters.swaps
    assert rig.worker.num_accepted
    assert rig.scheduler.counters.cached_tokens


@pytest.mark.parametrize("length", [1, 2, 28, 29, 30])
@pytest.mark.parametrize("num_slots", [3, 20])
def test_samples_fork_from_the_state_before_the_last_token(length: int, num_slots: int) -> None:
    rigs = [Rig(60, num_state_slots=slots, max_num_batched_tokens=64) for slots in (0, num_slots)]
    for rig in rigs:
        for name in ("samples", "found again"):
            rig.add(name, PROMPT[:length], 6, n=3)
            rig.drain()
            outputs = [rig.output(name, index) for index in range(3)]
            assert outputs == [expected(PROMPT[:length], 6, sample=i) for i in range(3)]
    plain, hybrid = (rig.worker.num_written for rig in rigs)
    if num_slots == 20 and length > 1:
        computed_again = length - (length - 1) // 4 * 4  # of the second request, as it is for one sample
        assert hybrid <= plain + computed_again, "nothing is computed again for a sample"


@pytest.mark.parametrize("num_slots", [4, 9, 40])
def test_beams_share_the_state_where_they_part(num_slots: int) -> None:
    rigs = [Rig(200, num_state_slots=slots, max_num_batched_tokens=64) for slots in (0, num_slots)]
    for rig in rigs:
        rig.add("other", [2, 7, 1, 8], 12)
        rig.add("a", PROMPT, 10, n=4, use_beam_search=True)
        rig.drain()
    plain, hybrid = rigs
    assert [hybrid.output("a", index) for index in range(4)] == [plain.output("a", index) for index in range(4)]
    assert hybrid.output("other") == expected([2, 7, 1, 8], 12)
    if num_slots == 40:
        assert hybrid.worker.num_written == plain.worker.num_written, "nothing is computed again"


def test_after_a_reset_nothing_is_found_and_after_a_death_neither() -> None:
    rig = rig_with(20)
    run(rig, "first", PROMPT)
    rig.scheduler.reset_prefix_cache()
    assert cached(run(rig, "again", PROMPT)) == 0
    assert cached(run(rig, "found", PROMPT)) == 28
    rig.add("hurt", PROMPT, 6)
    rig.step()
    rig.restart_workers()
    rig.drain()
    assert rig.output("hurt") == expected(PROMPT, 6)


@pytest.mark.parametrize("num_steps", range(1, 10))
def test_the_states_of_dead_workers_are_not_found(num_steps: int) -> None:
    """Wherever the workers die, nothing that they computed is found afterwards."""
    rig = rig_with(20)
    rig.add("hurt", PROMPT, 10)
    for _ in range(num_steps):
        rig.step()
    rig.restart_workers()
    rig.drain()
    assert rig.output("hurt") == expected(PROMPT, 10)
    tokens = PROMPT + rig.output("hurt")
    found = [cached(run(rig, f"edited behind {length}", [*tokens[:length], 7])) for length in range(31, 41)]
    assert found[-1] >= 36


@pytest.mark.parametrize("num_steps", range(1, 10))
def test_a_request_that_is_not_to_be_trusted_leaves_no_state(num_steps: int) -> None:
    rig = rig_with(20)
    request = rig.add("corrupted", PROMPT, 10, n=2, marks=(9,))
    for _ in range(num_steps):
        rig.step()
    rig.scheduler.queues.end(request, "error", forget=True)
    assert rig.states is not None
    rig.states.begin_step()
    rig.scheduler.check_integrity()
    assert rig.states.pool.num_cached == 0


def test_a_prompt_that_was_swapped_out_leaves_its_states_all_the_same() -> None:
    rig = Rig(10, num_state_slots=9, num_host_blocks=40, num_host_states=9, preemption="swap", max_num_batched_tokens=2)
    rig.add("long", [1] * 8, 24)
    prompt = [2] * 21
    rig.add("swapped", prompt, 1)
    rig.drain()
    assert rig.scheduler.counters.swaps
    assert cached(run(rig, "again", [*prompt, 3])) == 20


@pytest.mark.parametrize(("blocks_each", "how"), [(0, "swap"), (1000, "recompute")])
def test_the_time_to_move_a_state_counts_in_preemptions(blocks_each: int, how: str) -> None:
    sizes: dict[str, Any] = {
        "num_state_slots": 9,
        "num_host_blocks": 40,
        "num_host_states": 9,
        "blocks_each": blocks_each,
    }
    rig = Rig(10, **sizes, preemption="auto", max_num_batched_tokens=2)
    rig.scheduler.rates = Rates(prefill_tokens_per_s=100.0, swap_blocks_per_s=1000.0)
    for number, max_tokens in ((1, 24), (2, 12)):
        rig.add(f"r{number}", [number] * 8, max_tokens)
    while rig.scheduler.counters.preemptions == 0:
        rig.step()
    assert [numbers["by"] for code, numbers in rig.decisions if code == "preempted"] == [how]


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("length", [1, 4, 8, 12])
def test_beams_that_took_all_slots_continue(length: int, num_slots: int) -> None:
    """The slot of the one that gives way is free a step later, and nothing else would wake the engine up."""
    rig = rig_with(num_slots)
    rig.add("beams", PROMPT[:length], 9, n=2, use_beam_search=True)
    rig.add("other", [2, 7, 1, 8], 5)
    rig.drain()
    assert rig.output("other") == expected([2, 7, 1, 8], 5)


def test_a_state_that_is_moved_between_two_steps_counts_for_the_next() -> None:
    """Beams and forks take slots while no step is in the making."""
    host = HostStates(2, 10, 1, StateHistories(12))
    host.begin_step()
    host.demote(b"key", History(0, b"key"), 3)
    host.begin_step()
    assert not host.may_move
    assert len(host.take_ops()) == 1
    host.begin_step()
    assert host.may_move


def test_a_state_that_has_taken_up_drafts_behind_the_end_is_not_found() -> None:
    """Drafts of the step before proved wrong, so these cross the end of a block; the first token behind it is a stop
    token, and so the sequence ends where a block does."""
    rig = Rig(60, num_state_slots=20, depth=2, come_together=True, num_drafts=3, max_num_batched_tokens=64)
    cached_contents = CachedContents(rig.kv)
    rig.add("r", [7, 17, 19, 27], 9, frozenset((19, 23, 27, 31, 43)))
    while rig.scheduler.requests:
        rig.step()
        cached_contents.check(rig.worker, rig.scheduler.queues.unfinished())
    assert len(rig.output("r")) == 5
    assert rig.worker.num_accepted > 3


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_behind", [0, 1, 3])
def test_a_fork_of_a_live_request_computes_less_than_a_block_again(num_behind: int, depth: int) -> None:
    """Wherever it is: the steps ahead have saved the state at a later end of a block already."""
    for num_output in range(12, 28):
        rig = Rig(60, 8, num_state_slots=20, depth=depth, max_num_batched_tokens=64)
        parent = rig.add("parent", PROMPT[:5], 40)
        while parent.sequences[0].num_output < num_output:
            rig.step()
        output = parent.sequences[0].tokens[5:][: num_output - num_behind].tolist()
        message = Generate("b", pack_tokens(PROMPT[:5]), SamplingParams(), len(output), pack_tokens(output))
        rig.scheduler.branching.fork_request(parent, Request(message, b"client", 6 + len(output), frozenset()))
        rig.outputs["b", 0] = output
        rig.drain()
        computed = [int(numbers["tokens"]) for code, numbers in rig.decisions if code == "admitted"]
        assert all(tokens <= rig.kv.block_size for tokens in computed[1:])


@pytest.mark.parametrize("windows", [(), (None,)], ids=["states alone", "with KV"])
def test_states_of_prompts_from_before_a_reset_are_not_found(windows: tuple[int | None, ...]) -> None:
    rig = Rig(20, windows=windows, num_state_slots=9, max_num_batched_tokens=64)
    prompt = [1] * 13
    rig.add("begun before", prompt, 30)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.reset_prefix_cache().num_live == 1
    rig.drain()
    again = rig.add("again", [*prompt, *rig.output("begun before")], 2)
    rig.drain()
    assert again.num_cached_at_start == 0
