"""Samples, forks, beams, swapping, windows, drafts, overlap, policies: against the worker that checks every slot."""

import pytest

from tests.scheduler_rig import VOCAB, Rig, expected, expected_beams
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.policy import Fair, Priority
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import BlockOp


def test_samples_share_the_prompt_and_part_at_their_first_token() -> None:
    rig = Rig(num_blocks=30, max_num_batched_tokens=64)
    rig.add("a", list(range(10)), max_tokens=6, n=3)
    rig.step()
    rig.step()
    assert rig.worker.num_scheduled[:2] in ([10, 3], [12, 3])
    assert rig.kv.pool.num_used <= 3 + 2
    rig.drain()
    assert rig.kv.counters.copied_blocks == 2, "of three writers to one shared tail the last writes in place"
    for index in range(3):
        assert rig.output("a", index) == expected(list(range(10)), 6, sample=index)


def test_samples_without_a_slot_are_admitted_later() -> None:
    rig = Rig(max_num_seqs=2)
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=6, n=5)
    rig.drain()
    for index in range(5):
        assert rig.output("a", index) == expected([1, 2, 3, 4, 5], 6, sample=index)


def test_a_fork_of_a_live_request_continues_from_its_tokens() -> None:
    rig = Rig(num_blocks=30)
    parent = rig.add("a", [1, 2, 3, 4, 5], max_tokens=9)
    for _ in range(4):
        rig.step()
    have = rig.output("a")
    message = Generate("b", pack_tokens([1, 2, 3, 4, 5]), SamplingParams(max_tokens=9), len(have), pack_tokens(have))
    used = rig.kv.pool.num_used
    child = Request(message, b"client", 14, frozenset())
    rig.scheduler.branching.fork_request(parent, child)
    rig.outputs["b", 0] = list(have)
    assert rig.kv.pool.num_used == used
    rig.drain()
    assert rig.output("a") == rig.output("b") == expected([1, 2, 3, 4, 5], 9)


@pytest.mark.parametrize("num_blocks", [12, 40])
@pytest.mark.parametrize("num_host_blocks", [0, 30])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_over_shared_blocks_equals_beam_search_over_lists(
    width: int, num_host_blocks: int, num_blocks: int
) -> None:
    rig = Rig(num_blocks, num_host_blocks=num_host_blocks, preemption="swap", max_num_seqs=6)
    prompt, stop = [3, 1, 4, 1, 5, 9, 2], frozenset((7, 8, 9, 10))
    rig.add("other", [2, 7, 1, 8], max_tokens=12)
    rig.add("a", prompt, max_tokens=10, stop=stop, n=width, use_beam_search=True)
    rig.drain()
    wanted = expected_beams(prompt, width, 10, stop)
    assert [rig.output("a", index) for index in range(width)] == wanted
    assert rig.output("other") == expected([2, 7, 1, 8], 12)


def test_a_swapped_sequence_returns_without_computing_anything_again() -> None:
    rig = Rig(num_blocks=7, caching=False, num_host_blocks=10, preemption="swap")
    rig.add("a", [1, 2, 3, 4, 5, 6], max_tokens=12)
    rig.add("b", [11, 12, 13, 14, 15, 16], max_tokens=12)
    rig.drain()
    assert rig.scheduler.counters.swaps > 0
    assert rig.worker.num_written == 2 * (6 + 11)
    assert {op for op, _, _ in rig.worker.ops} == {BlockOp.SWAP_OUT, BlockOp.SWAP_IN}
    assert rig.output("a") == expected([1, 2, 3, 4, 5, 6], 12)
    assert rig.output("b") == expected([11, 12, 13, 14, 15, 16], 12)


def test_no_room_on_the_host_means_computing_again() -> None:
    rig = Rig(num_blocks=7, caching=False, num_host_blocks=1, preemption="swap")
    rig.add("a", [1, 2, 3, 4, 5, 6], max_tokens=12)
    rig.add("b", [11, 12, 13, 14, 15, 16], max_tokens=12)
    rig.drain()
    assert (rig.scheduler.counters.swaps, rig.scheduler.counters.preemptions > 0) == (0, True)


def test_an_evicted_prefix_is_promoted_on_a_hit() -> None:
    rig = Rig(num_blocks=6, num_host_blocks=20, max_num_batched_tokens=64)
    rig.add("a", list(range(12)), max_tokens=1)
    rig.drain()
    rig.add("b", [40] * 17, max_tokens=1)
    rig.drain()
    assert rig.kv.counters.demoted_blocks >= 3
    written = rig.worker.num_written
    request = rig.add("c", list(range(12)), max_tokens=1)
    rig.drain()
    assert request.num_cached_at_start == 11
    assert rig.worker.num_written == written
    assert rig.output("c") == rig.output("a")


def test_blocks_out_of_the_window_are_freed_at_once() -> None:
    rig = Rig(num_blocks=8, windows=[8], max_num_batched_tokens=8)
    rig.add("a", list(range(30)), max_tokens=20)
    peak = 0
    while rig.scheduler.requests:
        rig.step()
        peak = max(peak, rig.kv.pool.num_used)
    assert peak <= 5
    assert rig.output("a") == expected(list(range(30)), 20)


def test_a_window_needs_only_its_own_blocks_for_a_hit() -> None:
    rig = Rig(num_blocks=40, windows=[8], max_num_batched_tokens=64)
    rig.add("a", list(range(21)), max_tokens=1)
    rig.drain()
    rig.kv.pool.forget([rig.kv.pool.get_cached_block(rig_key(rig, list(range(21)), 0)) or 0])
    request = rig.add("b", list(range(21)), max_tokens=1)
    rig.drain()
    assert request.num_cached_at_start == 20


def rig_key(rig: Rig, tokens: list[int], index: int) -> bytes:
    hashes: list[bytes] = []
    rig.kv.hasher.extend(hashes, rig.kv.hasher.root(), memoryview(pack_tokens(tokens)), len(tokens))
    return hashes[index] + rig.blocks.groups[0].key


def test_drafts_give_the_same_tokens_in_fewer_steps() -> None:
    plain, drafting = Rig(num_blocks=40), Rig(num_blocks=40, num_drafts=4)
    for rig in (plain, drafting):
        rig.add("a", [1, 2, 3], max_tokens=40)
        rig.drain()
    assert drafting.output("a") == plain.output("a")
    assert drafting.scheduler.counters.steps < 0.6 * plain.scheduler.counters.steps


def test_overlapped_steps_give_the_same_tokens() -> None:
    rig = Rig(num_blocks=40, depth=2)
    answer = expected([1, 2, 3], 20)
    rig.add("a", [1, 2, 3], max_tokens=20, stop=frozenset([answer[9]]))
    rig.add("b", [4, 5, 6], max_tokens=20)
    rig.drain()
    assert rig.output("a") == answer[: answer.index(answer[9]) + 1]
    assert rig.output("b") == expected([4, 5, 6], 20)


def test_high_priority_is_served_first_and_preempted_last() -> None:
    rig = Rig(num_blocks=7, caching=False, policy=Priority(), max_num_seqs=2)
    rig.add("low", [1, 2, 3, 4, 5, 6], max_tokens=12, priority=5)
    rig.add("mid", [11, 12, 13, 14, 15, 16], max_tokens=12, priority=1)
    rig.add("high", [21, 22], max_tokens=3, priority=-1)
    rig.drain()
    order = [name for name, _ in rig.reasons]
    assert order[0] == "high"
    assert {str(numbers["for"]) for code, numbers in rig.decisions if code == "preempted"} <= {"mid", "high"}
    assert rig.output("low") == expected([1, 2, 3, 4, 5, 6], 12)


def test_fairness_serves_the_tenant_that_had_least() -> None:
    rig = Rig(num_blocks=60, policy=Fair(), max_num_seqs=1)
    for index in range(6):
        rig.add(f"greedy{index}", [1, index, 3, 4], max_tokens=4, user="greedy")
    rig.step()
    rig.add("modest", [9, 9, 9], max_tokens=4, user="modest")
    rig.drain()
    assert [name for name, _ in rig.reasons].index("modest") == 1


def test_a_policy_at_fault_is_replaced_once_and_nothing_is_lost() -> None:
    class Broken:
        def order(self, waiting: list[object], view: object) -> list[object]:  # noqa: ARG002
            return waiting[:-1]

    rig = Rig(policy=Broken(), max_num_seqs=1)
    for name in "abc":
        rig.add(name, [1, 2, 3], max_tokens=2)
    rig.drain()
    assert [code for code, _ in rig.decisions].count("policy_fault") == 1
    assert len(rig.reasons) == 3


def test_a_passed_deadline_ends_the_request_and_frees_its_blocks() -> None:
    rig = Rig()
    rig.add("a", [1, 2, 3], max_tokens=9, deadline_s=7.0, deadline_ms=50)
    rig.step()
    assert rig.scheduler.expire(6.9) == []
    (ended,) = rig.scheduler.expire(7.0)
    assert (ended.reason, ended.start) == ("error", 1)
    assert rig.kv.pool.num_used == 0


def test_a_model_without_kv_needs_no_blocks() -> None:
    rig = Rig(num_blocks=2, windows=[])
    rig.add("a", list(range(40)), max_tokens=9)
    rig.drain()
    assert rig.output("a") == expected(list(range(40)), 9)


def served_by_tenant(slots: int) -> dict[str, int]:
    """Tokens computed for a tenant with long requests and for one with short ones. Both always have six requests."""
    policy = Fair()
    served = {"heavy": 0, "light": 0}
    charged = policy.charged

    def count(sequence: Sequence, num_tokens: int) -> None:
        served[sequence.request.params.user or ""] += num_tokens
        charged(sequence, num_tokens)

    policy.charged = count  # type: ignore[method-assign]
    rig = Rig(200, policy=policy, max_num_seqs=slots)
    number = 0
    for _ in range(400):
        for tenant, prompt, output in (("heavy", 40, 20), ("light", 4, 2)):
            while sum(name.startswith(tenant) for name in rig.scheduler.requests) < 6:
                number += 1
                rig.add(f"{tenant}{number}", [number % VOCAB] * prompt, output, user=tenant)
        rig.step()
    return served


@pytest.mark.parametrize("slots", [1, 2, 4, 6])
def test_fairness_holds_whatever_the_slots(slots: int) -> None:
    served = served_by_tenant(slots)
    assert 0.8 < served["heavy"] / served["light"] < 1.25


def test_beams_do_not_end_before_min_tokens() -> None:
    rig = Rig(200)
    rig.add("a", [1, 2, 3], 8, frozenset(range(25)), use_beam_search=True, n=2, min_tokens=6)
    rig.drain()
    assert min(len(rig.output("a", index)) for index in range(2)) > 6


def test_a_swapped_fork_leaves_the_shared_block_alone() -> None:
    rig = Rig(40, num_host_blocks=20, preemption="swap", max_num_batched_tokens=64)
    parent = rig.add("a", list(range(7)), max_tokens=9)
    rig.step()
    rig.step()
    have = rig.output("a")[:1]
    message = Generate("b", pack_tokens(range(7)), SamplingParams(max_tokens=9), 1, pack_tokens(have))
    child = Request(message, b"client", 16, frozenset())
    rig.scheduler.branching.fork_request(parent, child)
    sequence = child.sequences[0]
    assert rig.kv.swap_out(sequence)
    rig.kv.swap_in(sequence, 8)
    assert sequence.num_cached == 8, "its last block is shared: position 7 is computed for its logits only"


def test_a_prompt_that_cannot_be_cut_is_refused_or_served() -> None:
    class Stingy:
        def budget(self, view: object) -> int:  # noqa: ARG002
            return 8

    rig = Rig(40, chunked_prefill=False, policy=Stingy())
    rig.add("a", list(range(12)), 3)
    rig.drain()
    with pytest.raises(RequestError, match="holds 16"):
        rig.add("b", list(range(20)), 3)


def test_the_fork_of_a_waiting_request_waits_its_turn() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("running", [1], max_tokens=9)
    rig.step()
    rig.add("old", [2])
    parent = rig.add("parent", [3])
    message = Generate("child", pack_tokens([3]), SamplingParams(max_tokens=5))
    rig.scheduler.branching.fork_request(parent, Request(message, b"client", 6, frozenset()))
    assert [sequence.request.request_id for sequence in rig.scheduler.waiting] == ["old", "parent", "child"]


def test_a_fork_behind_a_window_that_has_moved_on_is_computed_again() -> None:
    rig = Rig(5, windows=[5], max_num_batched_tokens=4, caching=False)
    parent = rig.add("a", [1, 2, 3], max_tokens=20)
    for _ in range(14):
        rig.step()
    have = rig.output("a")[:2]
    message = Generate("b", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=20), 2, pack_tokens(have))
    rig.outputs["b", 0] = list(have)
    rig.scheduler.branching.fork_request(parent, Request(message, b"client", 23, frozenset()))
    rig.drain()
    assert rig.output("b") == rig.output("a") == expected([1, 2, 3], 20)


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_sample_preempted_in_its_first_step_is_forked_before_it_is_preempted(num_host_blocks: int) -> None:
    """The new sample is not swapped, because the step that would move its blocks is the one that computes them."""

    class ByName:
        def order(self, waiting: list[Sequence], view: object) -> list[Sequence]:  # noqa: ARG002
            return sorted(waiting, key=lambda sequence: sequence.request.request_id)

    swaps = {"preemption": "swap", "num_host_blocks": num_host_blocks}
    rig = Rig(6, policy=ByName(), max_num_batched_tokens=8, caching=False, **swaps)  # type: ignore[arg-type]
    rig.add("q", [1] * 7, max_tokens=8)
    rig.step()
    rig.add("p", list(range(12)), max_tokens=4, n=2)
    rig.step()
    rig.step()  # p is complete and forks; q, behind it, needs a block; the new sample came last
    assert rig.scheduler.counters.preemptions > 0
    rig.drain()
    assert rig.output("q") == expected([1] * 7, 8)
    for index in range(2):
        assert rig.output("p", index) == expected(list(range(12)), 4, sample=index)
