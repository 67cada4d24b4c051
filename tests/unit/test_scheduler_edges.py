"""Edge cases of the scheduler whose faults would show late: memory of tenants, ends of drafts, cached tokens of
forks."""

import itertools

import pytest

from tests.scheduler_rig import VOCAB, Rig
from tests.unit.test_meter import Bench
from vllm_lite.engine.scheduling import admission
from vllm_lite.engine.scheduling.admission import MAX_PASSED
from vllm_lite.engine.scheduling.policy import Fair
from vllm_lite.engine.scheduling.waiting_queue import MIN_PRUNE, FairQueue
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.api import ForkRequest
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import Draft


class Counting(Fair):
    """Counts the tokens that each tenant's requests compute."""

    def __init__(self) -> None:
        super().__init__()
        self.served = {"heavy": 0, "light": 0}

    def charged(self, sequence: Sequence, num_tokens: int) -> None:
        self.served[sequence.request.params.user or ""] += num_tokens
        super().charged(sequence, num_tokens)


def test_a_tenant_keeps_its_count_over_a_short_pause() -> None:
    """One tenant sends a long request one step after its last one has ended; the other always has short ones
    waiting."""
    policy = Counting()
    rig = Rig(200, policy=policy, max_num_seqs=1)
    names = (f"light-{number}" for number in itertools.count())
    pause = 0
    for now in range(400):
        open_now = [name.partition("-")[0] for name in rig.scheduler.requests]
        pause = 0 if "heavy" in open_now else pause + 1
        if pause > 1:
            rig.add(f"heavy-{now}", [now % VOCAB] * 40, 4, user="heavy")
        for _ in range(6 - open_now.count("light")):
            rig.add(next(names), [now % VOCAB] * 4, 2, user="light")
        rig.step()
    assert 0.8 < policy.served["heavy"] / policy.served["light"] < 1.25


@pytest.mark.parametrize("depth", [1, 2])
def test_no_draft_reaches_behind_the_end_of_its_sequence(depth: int) -> None:
    """The last token is never computed, so there is no room for its KV, in the step or in the blocks."""
    rig = Rig(num_blocks=40, block_size=4, num_drafts=4, depth=depth)
    request = rig.add("a", [1, 2, 3], max_tokens=17)
    (sequence,) = request.sequences
    reached = list[int]()
    rig.watch(lambda step: reached.extend(sequence.num_computed for entry in step.entries if isinstance(entry, Draft)))
    rig.drain()
    assert len(reached) > 2
    assert max(reached) == sequence.max_len - 1 == 19


def test_a_fork_found_its_whole_prompt() -> None:
    """The parent computed the prompt: the fork's end reports it as cached, and it does not count as prompt tokens
    again."""
    for num_slots in (8, 1):  # the fork runs at once, or waits in the queue first
        bench = Bench(max_num_seqs=num_slots)
        bench.add("parent", [1, 2, 3, 4, 5, 6], 6)
        for _ in range(3):
            bench.begin()
            bench.finish()
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        child = bench.core.fork(b"c", ForkRequest("parent", "child", 2, params))
        assert bench.core.describe(("child",)).requests[0].num_cached == 6
        bench.drain()
        assert child.num_cached_at_start == 6
        assert bench.stats.prompt_tokens == 6


def test_short_prompts_pass_a_long_one_that_waits_for_its_share_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long prompt loses nothing by being passed, so this is not counted, and the cache is not looked up for it in
    every step."""
    monkeypatch.setattr(admission, "MAX_LOOKED_UP_TOKENS", 1000)
    rig = Rig(3000, max_num_batched_tokens=64, max_num_seqs=8)
    for number in range(3):
        rig.add(f"long{number}", [number, *range(3, 49)] * 40, max_tokens=1)
    rig.step()
    rig.step()
    for number in range(3 * MAX_PASSED):
        rig.add(f"short{number}", [number // 50 + 5, number % 50] * 5, max_tokens=1)
    for _ in range(MAX_PASSED + 8):  # three of them in a step
        rig.step()
    assert [*rig.scheduler.requests] == ["long0", "long1", "long2"]


def test_tenants_without_a_running_request_are_forgotten() -> None:
    rig = Rig(100, policy=Fair())
    rig.add("stream", [1] * 5, max_tokens=50, user="stream")
    rig.step()
    queue = rig.scheduler.waiting
    assert isinstance(queue, FairQueue)
    for number in range(10 * MIN_PRUNE):
        rig.add(f"r{number}", [1], max_tokens=1, user=f"u{number}")
        rig.abort(f"r{number}")
    assert len(queue._served) <= 2 * MIN_PRUNE
    rig.drain()


def test_no_sequence_passes_a_preempted_stream() -> None:
    """A sequence that took the blocks it waits for would be preempted next."""
    rig = Rig(40, max_num_seqs=6, max_num_batched_tokens=64)
    for number in range(60):
        rig.add(f"r{number}", [(number * 7 + index) % 50 for index in range(60)], max_tokens=40)
    rig.drain()
    assert rig.scheduler.counters.preemptions <= 60
    assert rig.worker.num_written < 2 * 60 * 100


def test_a_preempted_sequence_may_be_passed_anew() -> None:
    rig = Rig()
    sequence = rig.add("a", [1, 2, 3]).sequences[0]
    rig.step()
    sequence.num_passed = MAX_PASSED
    rig.scheduler.queues.leave(sequence)
    rig.kv.release(sequence)
    rig.scheduler.queues.wait(sequence, Status.PREEMPTED)
    assert (sequence.num_passed, list(rig.scheduler.waiting), rig.scheduler.running) == (0, [sequence], [])
