"""Loss of all workers, and their replacement, for each kind of sequence.

Every stream continues without a difference. The simulated workers check each position that they read, and have nothing
of the dead workers' KV.
"""

from typing import Any

import pytest

from tests.recorded import Recorded
from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.scheduling.policy import Fair, Priority
from vllm_lite.engine.sequence import Status
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.api import ForkRequest
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import NewRequest

PROMPT = list(range(1, 11))


def order(rig: Rig) -> list[str]:
    return [sequence.request.request_id for sequence in rig.scheduler.waiting]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_steps", range(7))
def test_streams_continue_with_the_same_tokens(depth: int, num_steps: int) -> None:
    rig = Rig(depth=depth)
    rig.add("a", PROMPT, 9)
    rig.add("b", [7, 8, 9], 9)
    for _ in range(num_steps):
        rig.step()
    had = len(rig.output("a"))
    rig.restart_workers()
    assert len(rig.output("a")) == had
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 9)
    assert rig.output("b") == expected([7, 8, 9], 9)


def test_every_sequence_waits_in_the_old_order_with_its_tokens_and_nothing_else() -> None:
    rig = Rig(max_num_seqs=2, depth=2)
    requests = [rig.add(name, PROMPT, 9) for name in "abcd"]
    for _ in range(3):
        rig.step()
    assert [sequence.status for request in requests for sequence in request.sequences][1:3] == [
        Status.RUNNING,
        Status.WAITING,
    ]
    rig.lose_workers()
    assert not rig.scheduler.running
    assert order(rig) == list("abcd")
    for request in requests:
        (sequence,) = request.sequences
        assert sequence.tokens.tolist() == PROMPT + rig.output(request.request_id)
        assert (sequence.handle, sequence.decode_entry, sequence.lookup) == (-1, None, None)
        assert (sequence.num_pending, sequence.num_computed, sequence.num_cached, sequence.num_slots) == (0, 0, 0, 0)
        assert not any(table.ids for table in sequence.tables)
    assert [request.sequences[0].status for request in requests] == 2 * [Status.PREEMPTED] + 2 * [Status.WAITING]
    assert rig.scheduler.counters.preemptions == sum(request.num_preemptions for request in requests) == 0
    rig.replace_workers()
    rig.drain()
    assert all(rig.output(name) == expected(PROMPT, 9) for name in "abcd")


@pytest.mark.parametrize(("policy", "first"), [(Priority(), list("cab")), (Fair(), list("bca"))])
def test_the_policy_orders_sequences_that_ran_before_the_death(policy: object, first: list[str]) -> None:
    """Under `fair` the tenant of b and c has had less: the service of those that ran is not forgotten."""
    rig = Rig(max_num_seqs=2, policy=policy)
    rig.add("a", list(range(14)), 9, user="x", priority=1)
    rig.add("b", [5, 6], 9, user="y", priority=1)
    rig.step()
    rig.add("c", [7, 8], 9, user="y", priority=0)
    rig.lose_workers()
    assert order(rig) == first
    rig.replace_workers()
    rig.drain()


def test_nothing_is_passed_by_others_that_had_begun() -> None:
    """A sequence that ran before has a client that waits, so no new request is admitted before it, even if only the new
    one fits."""
    rig = Rig(num_blocks=10, max_num_batched_tokens=40)
    rig.add("long", list(range(24)), 8)
    rig.step()
    rig.lose_workers()
    rig.replace_workers()
    rig.kv.pool.get_new_blocks(4)  # as if somebody held them
    rig.add("short", [1, 2], 3)
    assert rig.scheduler.schedule() is None
    assert order(rig) == ["long", "short"]


def test_a_chunked_prompt_begins_again() -> None:
    rig = Rig(max_num_batched_tokens=4, depth=2)
    rig.add("a", PROMPT, 4)
    rig.step()
    assert 0 < rig.scheduler.running[0].num_computed < len(PROMPT)
    rig.restart_workers()
    written = rig.worker.num_written
    rig.drain()
    assert rig.worker.num_written - written == len(PROMPT) + 3
    assert rig.output("a") == expected(PROMPT, 4)


def test_the_steps_in_flight_are_dropped_and_step_numbers_continue() -> None:
    rig = Rig(depth=3)
    rig.add("a", PROMPT, 9)
    rig.step()
    before, generation = rig.scheduler.step, rig.scheduler.generation
    stale = rig.worker._outputs[0]
    rig.restart_workers()
    output = rig.scheduler.schedule()
    assert output is not None
    assert (output.step, output.generation) == (before + 1, generation + 1)
    with pytest.raises(ProtocolError, match=f"of generation {generation + 1}, got step {stale.step} of generation"):
        rig.scheduler.update(stale)


def test_new_workers_hear_of_everything_anew() -> None:
    rig = Rig(num_blocks=9, depth=2)
    rig.add("a", PROMPT, 15)
    rig.add("b", PROMPT[::-1], 15)
    while not rig.scheduler.counters.preemptions:
        rig.step()
    rig.restart_workers()
    output = rig.scheduler.schedule()
    assert output is not None
    assert output.entries
    new = [entry for entry in output.entries if isinstance(entry, NewRequest)]
    assert new == output.entries, "neither Resume, nor Finish of old handles"
    assert [entry.handle for entry in new] == [*range(len(new))], "handles start anew as well"
    assert not output.block_ops


def test_entries_that_waited_for_the_next_step_are_dropped() -> None:
    """A Finish and a Fork that no worker has seen name handles that mean others now."""
    rig = Rig()
    rig.add("a", PROMPT, 9)
    rig.add("b", PROMPT[::-1], 9)
    rig.step()
    rig.abort("a")
    assert rig.scheduler.queues.entries
    rig.restart_workers()
    assert not rig.scheduler.queues.entries
    rig.drain()
    assert rig.output("b") == expected(PROMPT[::-1], 9)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_and_swapped_sequences_are_computed_again(preemption: str) -> None:
    rig = Rig(num_blocks=9, num_host_blocks=20, preemption=preemption, max_swap_blocks=1)
    rig.add("a", PROMPT, 15)
    rig.add("b", PROMPT[::-1], 15)
    while not rig.scheduler.counters.preemptions:
        rig.step()
    (sequence,) = rig.scheduler.waiting
    assert (sequence.host_ids is not None) == (preemption == "swap")
    rig.lose_workers()
    assert (sequence.host_ids, sequence.status, rig.blocks.swapping.parked) == (None, Status.PREEMPTED, [])
    assert not rig.blocks.is_moving
    rig.replace_workers()
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 15)
    assert rig.output("b") == expected(PROMPT[::-1], 15)


def test_moves_that_no_step_has_carried_are_dropped() -> None:
    """A step that computes nothing leaves its block program to the next one; that must not move lost blocks."""
    rig = Rig(num_blocks=9, num_host_blocks=20, preemption="swap", max_swap_blocks=2, depth=2)
    rig.add("a", PROMPT, 15)
    rig.add("b", PROMPT[::-1], 15)
    while not rig.scheduler.counters.swaps:
        rig.step()
    rig.blocks.swapping.copy(1, 2)
    rig.blocks.swapping.wanted = 2
    rig.lose_workers()
    assert not rig.blocks.is_moving
    rig.blocks.swapping.begin_step()
    assert rig.blocks.swapping.reserved == 0
    rig.replace_workers()
    rig.drain()


def test_blocks_of_lost_workers_are_not_found_on_either_tier() -> None:
    rig = Rig(num_blocks=10, num_host_blocks=20)
    for start in (0, 16, 32):
        rig.add(f"r{start}", list(range(start, start + 16)), 2)
        rig.drain()
    assert rig.kv.pool.num_cached
    assert rig.host is not None
    assert rig.host.pool.num_cached
    waits = rig.add("waits", list(range(16)), 2)
    assert rig.kv.find_cached(waits.sequences[0]).num_tokens
    rig.restart_workers()
    assert not rig.kv.find_cached(waits.sequences[0]).num_tokens
    rig.drain()
    assert rig.output("waits") == expected(list(range(16)), 2)


def test_a_waiting_sequence_forgets_its_cached_prefix() -> None:
    """Admission forgets a lookup that counts lost blocks."""
    rig = Rig(num_blocks=10, max_num_batched_tokens=40)
    rig.add("first", list(range(24)), 8)
    rig.step()
    prompt = [*range(12), *range(20)]
    waits = rig.add("waits", prompt, 3)
    rig.step()
    (sequence,) = waits.sequences
    assert sequence.lookup is not None
    assert sequence.lookup.num_cached
    rig.lose_workers()
    assert sequence.lookup is None
    rig.replace_workers()
    rig.drain()
    assert rig.output("waits") == expected(prompt, 3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(6))
def test_samples_before_and_after_they_are_forked(depth: int, num_steps: int) -> None:
    """With 10 tokens of which a step computes 4 the samples are born in the third."""
    rig = Rig(max_num_batched_tokens=4, depth=depth, max_num_seqs=3)
    request = rig.add("a", PROMPT, 6, n=4)
    for _ in range(num_steps):
        rig.step()
    born = not request.unforked
    rig.lose_workers()
    assert born == (not request.unforked)
    rig.replace_workers()
    rig.drain()
    for index in range(4):
        assert rig.output("a", index) == expected(PROMPT, 6, sample=index)


def test_remaining_samples_continue_after_lost_workers() -> None:
    stop = frozenset({expected(PROMPT, 4, sample=0)[1], expected(PROMPT, 4, sample=2)[2]})
    rig = Rig()
    request = rig.add("a", PROMPT, 12, stop, n=4)
    while len(request.sequences) in {1, 4}:
        rig.step()
    assert 0 < len(request.sequences) < 4
    rig.restart_workers()
    rig.drain()
    for index in range(4):
        assert rig.output("a", index) == expected(PROMPT, 12, stop, index)


def test_the_first_sample_ends_while_there_are_no_workers() -> None:
    """Another one computes the prompt then."""
    rig = Rig(max_num_batched_tokens=4)
    request = rig.add("a", PROMPT, 6, n=3)
    rig.step()
    rig.lose_workers()
    assert rig.scheduler.branching.end_samples(request, (0,), "stop") == [(0, 0)]
    rig.scheduler.check_integrity()
    rig.replace_workers()
    rig.drain()
    assert [rig.output("a", index) for index in (1, 2)] == [expected(PROMPT, 6, sample=index) for index in (1, 2)]


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_beams_continue_whichever_of_them_have_candidates(num_steps: int, num_blocks: int) -> None:
    """With 3 rows' worth of tokens in a step, 4 beams take two steps, and the first wait for the others."""
    outputs = []
    for dies in (False, True):
        rig = Rig(num_blocks=num_blocks, max_num_batched_tokens=4, num_host_blocks=8, preemption="swap")
        rig.add("other", [3, 4], 12)
        request = rig.add("a", PROMPT[:5], 6, n=4, use_beam_search=True)
        for _ in range(num_steps + 2):
            rig.step()
        if dies:
            rig.lose_workers()
            assert request.candidates == {}
            assert not any(sequence.num_pending for sequence in request.sequences)
            rig.replace_workers()
        rig.drain()
        outputs.append([rig.output("a", index) for index in range(4)])
        assert rig.output("other") == expected([3, 4], 12)
    assert outputs[0] == outputs[1]


def test_some_beams_have_their_candidates_when_the_workers_die() -> None:
    """The case above is met, not only near."""
    rig = Rig(max_num_batched_tokens=3)
    request = rig.add("a", PROMPT[:3], 6, n=4, use_beam_search=True)
    for _ in range(20):
        if request.candidates:
            break
        rig.step()
    assert 0 < len(request.candidates) < 4
    rig.restart_workers()
    assert request.candidates == {}
    rig.drain()


def core_and_parent() -> tuple[Recorded, Any]:
    recorded = Recorded(None)
    recorded.add("parent", PROMPT, 12, ignore_eos=True)
    for _ in range(5):
        recorded.loop()
    return recorded, recorded.scheduler.requests["parent"]


@pytest.mark.parametrize("when", ["before", "while", "running"])
def test_forks_of_a_request(when: str) -> None:
    recorded, parent = core_and_parent()
    have = parent.sequences[0].num_output - 1
    fork = ForkRequest("parent", "child", have, SamplingParams(max_tokens=12, ignore_eos=True))
    if when == "while":
        recorded.lose_workers()
    recorded.core.fork(b"client", fork)
    if when == "running":
        recorded.loop()
    if when != "while":
        recorded.lose_workers()
    child = recorded.scheduler.requests["child"]
    assert child.sequences[0].status is not Status.RUNNING
    sequences = parent.sequences[0], child.sequences[0]
    recorded.replace_workers()
    recorded.drain()
    for sequence in sequences:
        assert sequence.tokens.tolist() == PROMPT + expected(PROMPT, 12)


@pytest.mark.parametrize("num_steps", range(4))
def test_drafts_are_lost_with_their_step(num_steps: int) -> None:
    rig = Rig(num_drafts=3, depth=2)
    rig.add("a", PROMPT, 20)
    rig.add("b", [5], 20)
    for _ in range(num_steps):
        rig.step()
    rig.scheduler.schedule()  # a step with drafts, whose result is lost
    rig.restart_workers()
    assert not any(sequence.num_drafted or sequence.num_computed for sequence in rig.scheduler.waiting)
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 20)
    assert rig.output("b") == expected([5], 20)
    assert rig.worker.num_drafted


@pytest.mark.parametrize("windows", [(5,), (None, 6), (None, 3, 9)])
def test_windows(windows: tuple[int | None, ...]) -> None:
    rig = Rig(num_blocks=30, windows=windows)
    rig.add("a", PROMPT, 20)
    for _ in range(9):
        rig.step()
    rig.restart_workers()
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 20)


# ---- scores of prompts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(6))
def test_each_score_of_a_prompt_is_sent_once(depth: int, num_steps: int) -> None:
    """Another request has the same prompt cached; nothing of it is taken as long as a score is missing."""
    rig = Rig(max_num_batched_tokens=3, depth=depth)
    rig.add("a", PROMPT, 5, prompt_logprobs=1)
    for _ in range(num_steps):
        rig.step()
    rig.lose_workers()
    rig.add("before", PROMPT, 3, priority=-1)
    rig.replace_workers()
    rig.drain()
    assert rig.scores["a"] == [-float(token) for token in range(1, len(PROMPT))]
    assert rig.output("a") == expected(PROMPT, 5)


def test_a_prompt_is_scored_as_long_as_a_score_is_missing() -> None:
    """Each group of workers lives for one step more than the one before."""
    rig = Rig(max_num_batched_tokens=4)
    request = rig.add("a", PROMPT, 9, prompt_logprobs=1)
    (sequence,) = request.sequences
    scored = []
    for num_steps in range(1, 5):
        for _ in range(num_steps):
            rig.step()
        rig.restart_workers()
        scored.append(len(rig.scores["a"]))
        assert sequence.unscored == (scored[-1] < len(PROMPT) - 1)
        assert (sequence.sampling().prompt_logprobs is None) == (not sequence.unscored)
    assert scored == [4, 8, 9, 9]
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 9)
