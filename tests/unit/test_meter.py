"""Measurements of the engine: every value against a clock that only the test moves."""

import copy
import random
from collections import abc, defaultdict
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tests.scheduler_rig import Rig
from tests.simulated_worker import SimulatedWorker
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.observe.counters import FIRST_TOKEN_S, one_two_five
from vllm_lite.engine.request import Produced
from vllm_lite.protocol.api import ForkRequest, Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Histogram, RequestHistograms, Stats
from vllm_lite.protocol.step import NOT_FINITE

VOCAB = 50


class Bench:
    """A core with a simulated worker and the clock `now_s`; `got` has the outputs by time."""

    def __init__(self, num_blocks: int = 50, num_host_blocks: int = 0, **settings: Any) -> None:
        settings = {"block_size": 4, "async_scheduling": False, "device": "cpu", **settings}
        config = EngineConfig.check(settings).resolve(max_position_embeddings=100, dtype="float32", model_path="m")
        ready = Ready(0, 1, num_blocks, 64, (KVGroupInfo("full", 1),), 100, VOCAB, (7,))
        self.worker = SimulatedWorker(num_blocks, 4, vocab_size=VOCAB, num_host_blocks=num_host_blocks)
        self.now_s = 0.0
        sizes = PoolSizes(num_blocks, num_host_blocks)
        self.core = EngineCore(config, ready, self.worker, sizes, Lives(3), clock=lambda: self.now_s)  # type: ignore[arg-type]
        self.got: list[tuple[float, list[Produced]]] = []

    def add(self, name: str, prompt: abc.Sequence[int], max_tokens: int = 5, **params: Any) -> None:
        params = {"ignore_eos": True, **params}
        self.core.add(b"c", Generate(name, pack_tokens(prompt), SamplingParams(max_tokens=max_tokens, **params)))

    def begin(self) -> None:
        while self.core.begin():
            pass

    def finish(self, most: int = 1) -> int:
        """Take the results of at most `most` steps, as the engine's loop does when they come together."""
        for number in range(most):
            output = self.worker.poll()
            if output is None:
                return number
            self.got.append((self.now_s, self.core.finish(output)))
        return most

    def drain(self, step_s: float = 1.0) -> None:
        for _ in range(1000):
            self.begin()
            self.now_s += step_s
            if not self.finish() and not self.core.scheduler.requests:
                return
        raise AssertionError("requests are left")

    @property
    def stats(self) -> Stats:
        return copy.deepcopy(self.core.stats())

    @property
    def measured(self) -> RequestHistograms:
        measured = self.stats.requests
        assert measured is not None
        return measured


def count(histogram: Histogram) -> int:
    assert len(histogram.counts) == len(histogram.bounds) + 1
    return sum(histogram.counts)


def made_of(*values: float, bounds: tuple[float, ...]) -> Histogram:
    histogram = Histogram.over(bounds)
    for value in values:
        histogram.observe(value)
    return Histogram(bounds, histogram.counts, pytest.approx(histogram.sum))  # type: ignore[arg-type]


# ---- histograms


def test_a_value_belongs_to_the_first_bound_that_it_does_not_exceed() -> None:
    histogram = Histogram.over((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    histogram.observe(1.5, times=3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.sum == pytest.approx(6.6 + 4.5)


def test_bounds_of_tokens_reach_as_far_as_a_sequence() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(1) == (1,)
    assert one_two_five(2048)[-3:] == (500, 1000, 2000)


# ---- the life of a request


def test_a_request_is_measured_from_arrival_to_end() -> None:
    bench = Bench()
    bench.now_s = 10.0
    bench.add("r", [1, 2, 3], 3)
    bench.now_s = 11.0
    bench.begin()
    for bench.now_s in (13.0, 14.0, 16.5):
        assert bench.finish() == 1
        bench.begin()
    measured = bench.measured
    assert bench.stats.ended_by == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert measured.first_token_s == made_of(3.0, bounds=FIRST_TOKEN_S)
    for name, value in {
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "decode_s": 3.5,
        "inference_s": 5.5,
        "whole_s": 6.5,
        "mean_token_s": 1.75,
        "prompt_tokens": 3,
        "output_tokens": 3,
        "max_tokens": 3,
        "samples": 1,
        "longest_output": 3,
        "preemptions": 0,
        "computed_prompt_tokens": 3,
    }.items():
        histogram = getattr(measured, name)
        assert (count(histogram), histogram.sum) == (1, pytest.approx(value)), name
    assert measured.token_gap_s == made_of(1.0, 2.5, bounds=measured.token_gap_s.bounds)
    assert measured.step_tokens == made_of(3, 1, 1, bounds=measured.step_tokens.bounds)


def test_tokens_of_steps_add_up_to_prompts_and_outputs() -> None:
    """Every token counts, the last ones too; a prompt counts as a whole, in the step that gives the first token."""
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=4)
    bench.add("r", list(range(20)), 3)
    bench.drain()
    measured = bench.measured
    assert measured.gained_tokens == made_of(21, 1, 1, bounds=measured.gained_tokens.bounds)
    assert measured.step_tokens == made_of(8, 8, 4, 1, 1, bounds=measured.step_tokens.bounds)
    bench.add("cached", [*range(20), 30], 1)
    bench.add("several", [1, 2, 3], 4, n=3)
    bench.drain()
    stats, measured = bench.stats, bench.measured
    assert stats.cached_tokens == 20
    assert stats.prompt_tokens + stats.generated_tokens == (20 + 3) + (21 + 1) + (3 + 3 * 4)
    assert measured.gained_tokens.sum == stats.prompt_tokens + stats.generated_tokens


@pytest.mark.parametrize("together", [1, 3])
def test_tokens_of_steps_are_counted_with_steps_in_flight(together: int) -> None:
    bench = Bench(async_scheduling=True)
    bench.add("short", [1, 2, 3], 1)
    bench.add("long", [4, 5, 6, 7], 9)
    bench.add("beams", [8, 9], 4, n=2, use_beam_search=True, temperature=0.0)
    for _ in range(100):
        bench.begin()
        bench.now_s += 1.0
        bench.finish(together)
        if (
            bench.core.scheduler.requests.get("long")
            and bench.core.scheduler.requests["long"].sequences[0].num_output == 4
        ):
            child = SamplingParams(max_tokens=6, ignore_eos=True)
            if "child" not in bench.core.scheduler.requests:
                bench.core.fork(b"c", ForkRequest("long", "child", 3, child))
    assert not bench.core.scheduler.requests
    stats, measured = bench.stats, bench.measured
    assert stats.prompt_tokens == 3 + 4 + 2
    assert measured.gained_tokens.sum == stats.prompt_tokens + stats.generated_tokens


def test_one_token_has_no_mean_and_no_gap() -> None:
    bench = Bench()
    bench.add("r", [1, 2, 3], 1)
    bench.drain()
    measured = bench.measured
    assert (count(measured.first_token_s), count(measured.decode_s)) == (1, 1)
    assert count(measured.mean_token_s) == count(measured.token_gap_s) == 0


def test_a_request_aborted_while_it_waits_has_waited_all_the_time() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("runs", [1, 2, 3], 5)
    bench.add("waits", [4, 5, 6], 5)
    bench.begin()
    bench.now_s = 4.0
    bench.finish()
    assert (bench.stats.num_running, bench.stats.num_waiting) == (1, 1)
    bench.core.abort("waits")
    stats, measured = bench.stats, bench.measured
    assert (stats.num_running, stats.num_waiting, stats.prompt_tokens, stats.cache_queries) == (1, 0, 3, 3)
    assert bench.stats.ended_by["abort"] == 1
    assert (count(measured.queue_s), measured.queue_s.sum, measured.whole_s.sum) == (1, 4.0, 4.0)
    assert (count(measured.prompt_tokens), measured.output_tokens.sum) == (1, 0.0)
    assert count(measured.prefill_s) == count(measured.decode_s) == count(measured.inference_s) == 0


def test_ended_requests_free_their_blocks_without_another_step() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.add(name, [ord(name) % VOCAB] * 9, 5)
    bench.begin()
    bench.finish()
    steps, used = bench.stats.steps, bench.stats.num_used_blocks
    bench.core.abort("a")
    assert (bench.stats.num_used_blocks, bench.stats.steps) == (used // 2, steps)
    bench.core.abort("b", stopped=True)
    assert (bench.stats.num_used_blocks, bench.stats.num_running, bench.stats.steps) == (0, 0, steps)
    assert bench.stats.ended_by == {"stop": 1, "length": 0, "abort": 1, "error": 0}


def test_every_end_has_its_reason() -> None:
    bench = Bench()
    bench.add("length", [1, 2, 3], 2)
    bench.drain()
    stop = bench.got[0][1][0].token_ids[0]
    bench.add("stop", [1, 2, 3], 9, stop_token_ids=(stop,))
    bench.drain()
    bench.add("late", [1, 2, 3], 9, deadline_ms=500)
    bench.begin()
    bench.now_s += 1
    assert [item.reason for item in bench.core.expire()] == ["error"]
    assert bench.stats.ended_by == {"stop": 1, "length": 1, "abort": 0, "error": 1}
    bench.finish()
    bench.add("spoilt", [1, 2, 3], 9)
    bench.begin()
    output = bench.worker.poll()
    assert output is not None
    (sequence,) = bench.core.scheduler.in_flight.awaited
    bench.core.finish(msgspec.structs.replace(output, failed=[(sequence.handle, NOT_FINITE)]))
    assert (bench.stats.ended_by["error"], bench.stats.corrupted_requests) == (2, 1)
    assert sum(bench.stats.ended_by.values()) == count(bench.measured.whole_s) == 4


def test_samples_make_one_request() -> None:
    bench = Bench()
    bench.add("r", [1, 2, 3], 4, n=3)
    bench.drain()
    stats, measured = bench.stats, bench.measured
    assert bench.stats.ended_by["length"] == 1
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 12)
    assert (measured.output_tokens.sum, measured.samples.sum, measured.max_tokens.sum) == (12, 3, 4)
    assert measured.longest_output.sum == 4
    assert (count(measured.first_token_s), count(measured.token_gap_s)) == (1, 9)


def test_a_beam_search_counts_its_returned_tokens() -> None:
    bench = Bench()
    bench.add("r", [1, 2, 3], 4, n=2, use_beam_search=True)
    bench.drain()
    stats, measured = bench.stats, bench.measured
    returned = sum(len(item.token_ids) for _, items in bench.got for item in items)
    assert stats.generated_tokens == measured.output_tokens.sum == returned > 0
    assert (count(measured.first_token_s), count(measured.whole_s), count(measured.token_gap_s)) == (1, 1, 0)


def test_forks_and_resent_requests_are_counted_from_their_arrival() -> None:
    bench = Bench()
    bench.add("parent", [1, 2, 3], 6)
    for _ in range(3):
        bench.begin()
        bench.finish()
    bench.core.fork(b"c", ForkRequest("parent", "child", 2, SamplingParams(max_tokens=4, ignore_eos=True)))
    bench.drain()
    whole = [token for _, items in bench.got for item in items if item.sample == 0 for token in item.token_ids]
    assert len(whole) == 6 + 2
    message = Generate("moved", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=6), 2, pack_tokens(whole[:2]))
    bench.core.add(b"c", message)
    bench.drain()
    assert bench.measured.output_tokens.sum == bench.stats.generated_tokens == 6 + 2 + 4
    assert bench.stats.prompt_tokens == 6
    assert count(bench.measured.first_token_s) == 3


@pytest.mark.parametrize("preempted", [False, True])
def test_a_fork_that_runs_at_once_has_not_waited(preempted: bool) -> None:
    """The fork counts no waiting time, even if it is preempted and later admitted from the queue."""
    bench = Bench(num_blocks=12, preemption_mode="recompute")
    bench.add("parent", [1] * 9, 8 if not preempted else 26)
    for bench.now_s in (1.0, 2.0):
        bench.begin()
        bench.finish()
    bench.core.fork(
        b"c", ForkRequest("parent", "child", 1, SamplingParams(max_tokens=7 + 17 * preempted, ignore_eos=True))
    )
    bench.drain()
    assert (bench.stats.preemptions > 0) is preempted
    measured = bench.measured
    assert (count(measured.queue_s), measured.queue_s.sum) == (2, 1.0)
    assert (count(measured.inference_s), count(measured.prefill_s), measured.prefill_s.sum) == (2, 2, 1.0)
    assert measured.inference_s.sum == measured.whole_s.sum - 1.0


# ---- tokens and their times


def test_a_sequence_that_paused_is_measured_by_itself() -> None:
    """The blocks are for one of two: the other is preempted, and resumed when the first has ended."""
    bench = Bench(num_blocks=8, enable_prefix_caching=False, preemption_mode="recompute")
    bench.add("a", [1] * 11, 13)
    bench.add("b", [2] * 11, 4)
    bench.drain(1.0)
    assert bench.stats.preemptions == 1
    measured = bench.measured
    assert count(measured.token_gap_s) == 12 + 3
    last = [now_s for now_s, items in bench.got if any(item.request.request_id == "b" for item in items)]
    assert max(later - earlier for earlier, later in pairwise(last)) > 5
    assert measured.token_gap_s.sum == pytest.approx(12.0 + last[-1] - last[0])
    assert (count(measured.queue_s), measured.queue_s.sum) == (2, 0.0), "it waits for its first admission only"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_gaps_are_those_between_the_tokens_of_each_sample(seed: int, overlap: bool) -> None:
    """Arrivals, aborts, preemptions, several samples; results come one at a time."""
    rng = random.Random(seed)
    num_blocks = 30 if seed % 2 else 7
    bench = Bench(num_blocks, async_scheduling=overlap, max_num_seqs=6, max_num_batched_tokens=9)
    for number in range(60):
        if rng.random() < 0.5:
            prompt = [rng.randrange(50)] * rng.randint(1, 8)
            bench.add(f"r{number}", prompt, rng.randint(1, 12), n=rng.choice([1, 1, 3]), ignore_eos=rng.random() < 0.7)
        live = list(bench.core.scheduler.requests)
        if live and rng.random() < 0.1:
            bench.core.abort(rng.choice(live))
        bench.begin()
        bench.now_s += rng.random()
        bench.finish()
    bench.drain(rng.random())
    times = defaultdict(list)
    for now_s, items in bench.got:
        for item in items:
            times[item.request.request_id, item.sample].append(now_s)
    gaps = [later - earlier for sample in times.values() for earlier, later in pairwise(sample)]
    measured, num_requests = bench.measured, len({name for name, _ in times})
    assert measured.token_gap_s == made_of(*gaps, bounds=measured.token_gap_s.bounds)
    assert count(measured.first_token_s) == num_requests
    assert bench.stats.preemptions > 0 or seed % 2


def test_steps_that_come_together_share_their_time() -> None:
    bench = Bench(async_scheduling=True)
    bench.core.message_length.steps = 4
    bench.add("a", [1, 2, 3], 13)
    bench.begin()
    bench.now_s = 1.0
    bench.finish()
    bench.begin()
    while bench.core.scheduler.requests:
        bench.core.message_length.steps = 4
        bench.begin()
        bench.now_s += 4.0
        bench.finish(most=4)
    bench.begin()
    gaps = bench.measured.token_gap_s
    assert count(gaps) == 12
    assert gaps.sum == pytest.approx(12.0)
    assert gaps.counts[gaps.bounds.index(1.0)] == 12, "one second each, not three in no time and one in four"


@pytest.mark.parametrize("before", ["nothing", "a part of the prompt"])
def test_steps_that_come_together_share_no_time_from_before_they_ran(before: str) -> None:
    """After 100 s without tokens, the first two tokens of a request arrive at once, 2 s after their steps could
    begin."""
    bench = Bench(async_scheduling=True, max_num_batched_tokens=8)
    if before == "nothing":
        bench.now_s = 100.0
    bench.add("a", [1] * (3 if before == "nothing" else 11), 2)
    bench.begin()
    if before == "a part of the prompt":
        bench.now_s = 100.0
        bench.finish()
        bench.begin()
    bench.now_s = 102.0
    assert bench.finish(most=2) == 2
    assert not bench.core.scheduler.requests
    bench.begin()
    gaps = bench.measured.token_gap_s
    assert count(gaps) == 1
    assert gaps.sum == pytest.approx(1.0)


def test_no_request_is_remembered_after_all_have_ended() -> None:
    bench = Bench()
    bench.add("r", [1, 2, 3], 3)
    bench.drain()
    bench.begin()
    meter = bench.core.meter
    assert (meter._last, meter._untimed) == ([], [])


# ---- the cache


def test_hits_equal_the_cached_tokens_that_users_get() -> None:
    bench = Bench()
    for name, prompt in (("a", range(10)), ("b", range(14)), ("c", range(8)), ("d", range(20, 30))):
        bench.add(name, list(prompt), 1)
        bench.drain()
    cached = [items[0].request.num_cached_at_start for _, items in bench.got if items]
    assert cached == [0, 8, 7, 0], "whole blocks, and of a prompt that is known all tokens but the last"
    stats = bench.stats
    assert (stats.cached_tokens, stats.cache_queries, stats.prompt_tokens) == (15, 42, 42)
    assert bench.measured.computed_prompt_tokens.sum == 42 - 15
    assert stats.host_queries == stats.host_hits == 0


def test_a_sequence_admitted_again_is_not_counted_again() -> None:
    rig = Rig(num_blocks=9)
    rig.add("a", [1] * 12, 14)
    rig.add("b", [2] * 12, 14)
    rig.drain()
    assert rig.scheduler.counters.preemptions > 0
    assert (rig.scheduler.counters.cache_queries, rig.scheduler.counters.prompt_tokens) == (24, 24)


def test_without_a_cache_nothing_is_looked_up() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add("a", [1] * 8, 1)
    bench.drain()
    assert bench.stats.cache_queries == 0


def test_tokens_found_on_the_host_are_counted_apart() -> None:
    bench = Bench(num_blocks=8, num_host_blocks=20, swap_space=1.0)
    bench.add("first", list(range(16)), 1)
    bench.drain()
    bench.add("other", list(range(20, 43)), 1)  # takes the device's blocks: the first one's move to the host
    bench.drain()
    assert bench.stats.demoted_blocks >= 3
    before = bench.stats
    assert before.host_queries == 16 + 23
    bench.add("again", [*range(16), 48], 1)
    bench.drain()
    stats = bench.stats
    hits = stats.cached_tokens - before.cached_tokens
    on_host = stats.host_hits
    assert hits == 16
    assert on_host == 4 * (stats.promoted_blocks - before.promoted_blocks) > 0
    assert stats.host_queries - before.host_queries == 17 - (hits - on_host)


def test_preemptions_are_counted_by_their_mode() -> None:
    bench = Bench(num_blocks=9, num_host_blocks=20, swap_space=1.0, preemption_mode="swap")
    bench.add("a", [1] * 12, 14)
    bench.add("b", [2] * 12, 14)
    bench.drain()
    stats = bench.stats
    assert stats.preemptions == stats.swaps == bench.measured.preemptions.sum > 0
    assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0


# ---- gauges


def test_gauges_match_the_pools_and_queues() -> None:
    bench = Bench(num_blocks=50, num_host_blocks=10, max_num_seqs=1)
    bench.add("a", list(range(10)), 5)
    bench.add("b", [1], 1)
    bench.begin()
    during = bench.stats
    assert (during.num_running, during.num_waiting) == (1, 1)
    assert (during.num_blocks, during.num_used_blocks, during.num_host_blocks) == (49, 3, 10)
    bench.drain()
    after = bench.stats
    assert (after.num_running, after.num_waiting, after.num_used_blocks, after.peak_used_blocks) == (0, 0, 0, 4)
    assert after.num_cached_blocks == 3, "14 tokens have KV, which are three whole blocks"
