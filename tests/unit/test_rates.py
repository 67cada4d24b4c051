"""The rate at which prompts are computed: learned from steps one behind another, and what `auto` makes of it."""

import itertools
import math
from collections import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.scheduling.in_flight import InFlight
from vllm_lite.engine.scheduling.rates import MIN_CHUNK, MIN_PREFILL_TOKENS, PrefillRate, Rates
from vllm_lite.engine.sequence import Sequence
from vllm_lite.executor.simulated import CostModel, SimulatedExecutor, VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import Continue, Draft, SchedulerOutput
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader

COST = CostModel(step_s=0.005, token_s=20e-6)
CHUNK = 512


class Bench:
    """A core over an executor with a cost model. Moving a block takes much less time than computing it."""

    executor_type: ClassVar[type[SimulatedExecutor]] = SimulatedExecutor
    facts: ClassVar[Mapping[str, Any]] = {}
    """Further fields of Ready that the workers report."""

    def __init__(self, num_blocks: int, **settings: object) -> None:
        config = EngineConfig.check({"device": "cpu", "max_num_batched_tokens": CHUNK, **settings})
        config = config.resolve(max_position_embeddings=20_000, dtype="float32", model_path="m")
        config = msgspec.structs.replace(config, media_aside="placeholders" in self.facts)
        ready = Ready(0, 1, num_blocks, 1, (KVGroupInfo("full", 1),), 20_000, 32_000, (), **self.facts)
        self.clock = VirtualClock(100.0)
        self.executor = self.executor_type(ready, self.clock, COST)
        self.core = EngineCore(config, ready, self.executor, PoolSizes(num_blocks, 2000, 40_000), Lives(), self.clock)

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.core.add(b"client", Generate(name, pack_tokens([len(name)] * num_prompt), params))

    def run(self) -> None:
        self.drain()
        self.core.close()

    def drain(self) -> None:
        while self.core.scheduler.requests:
            while self.core.begin():
                pass
            self.clock.advance_to(self.executor.next_result_s or 0.0)
            while (output := self.executor.poll()) is not None:
                self.core.finish(output)

    @property
    def rate(self) -> float:
        return self.core.scheduler.rates.prefill_tokens_per_s


@pytest.mark.parametrize("overlapped", [True, False])
def test_the_prompt_rate_is_measured_on_steps_that_do_not_overlap(overlapped: bool) -> None:
    """Eight chunks of a prompt, two of them under way at a time: a step's wait for the one before is not its own."""
    bench = Bench(1000, async_scheduling=overlapped)
    bench.add("a", 8 * CHUNK, 1)
    bench.run()
    assert bench.rate == pytest.approx(CHUNK / (COST.step_s + CHUNK * COST.token_s))


def test_a_wait_for_work_is_not_a_step() -> None:
    bench = Bench(1000)
    for name in ("a", "bb"):
        bench.add(name, CHUNK, 1)
        bench.run()
        bench.clock.advance_to(bench.clock.now_s + 3600)
    assert bench.rate == pytest.approx(CHUNK / (COST.step_s + CHUNK * COST.token_s))


@pytest.mark.parametrize("overlapped", [True, False])
def test_auto_swaps_once_it_knows_the_rates(overlapped: bool, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    bench = Bench(200, async_scheduling=overlapped, record=trace, enable_prefix_caching=False)
    for index in range(16):
        bench.add("r" * (index + 1), 150, 100)
    bench.run()
    counters = bench.core.scheduler.counters
    assert counters.swaps == counters.preemptions > 0
    assert any(isinstance(record, records.RatesMeasured) for record in TraceReader(trace))
    assert Replay(trace).run().divergence is None


class Latencies(Bench):
    """Keeps when each token of a request came."""

    def __init__(self, num_blocks: int, **settings: object) -> None:
        super().__init__(num_blocks, **settings)
        self.came_s: dict[str, list[float]] = {}
        self.budgets: list[int] = []

    def run(self, num_steps: int = 10**9) -> None:
        """Run until `num_steps` steps are made or no requests are left."""
        while self.core.scheduler.requests and len(self.budgets) < num_steps:
            while self.core.begin():
                self.budgets.append(self.core.scheduler.num_scheduled_tokens)
            self.clock.advance_to(self.executor.next_result_s or 0.0)
            while (output := self.executor.poll()) is not None:
                for produced in self.core.finish(output):
                    times = self.came_s.setdefault(produced.request.request_id, [])
                    times += [self.clock.now_s] * len(produced.token_ids)
        if not self.core.scheduler.requests:
            self.core.close()

    def gaps_s(self, name: str) -> list[float]:
        times = self.came_s[name]
        return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_long_prompt_does_not_hold_up_those_that_decode(overlapped: bool, tmp_path: Path) -> None:
    """Steps take 5 ms and 20 us a token: for 8 ms a token there is time for 150 tokens in each."""
    trace = str(tmp_path / "trace")
    bench = Latencies(1500, async_scheduling=overlapped, max_itl_ms=8, record=trace)
    bench.add("a", 100, 200)
    bench.add("bb", 16_000, 1)
    bench.run()
    assert max(bench.budgets) > 400, "while the rate is not known, a chunk is whole"
    settled = bench.gaps_s("a")[50:90]
    assert settled == pytest.approx([0.008] * 40, rel=0.03)
    assert sum(bench.budgets) == 100 + 199 + 16_000
    assert Replay(trace).run().divergence is None


def test_a_goal_that_cannot_be_met_leaves_prompts_some_tokens() -> None:
    bench = Latencies(1000, max_itl_ms=1)
    for name in ("a", "aa", "aaa"):
        bench.add(name, 10, 300)
    bench.add("bbbb", 3000, 1)
    bench.run()
    chunks = bench.budgets[20:50]
    assert set(chunks) == {3 + MIN_PREFILL_TOKENS}, "of four that run three decode"


@pytest.mark.parametrize("overlapped", [True, False])
def test_chunks_are_sized_by_the_time_that_their_tokens_add(overlapped: bool, tmp_path: Path) -> None:
    """Next tokens alone take 5.02 ms: a goal of 5.5 ms leaves time for 24 tokens of prompts, fewer than show a rate."""
    trace = str(tmp_path / "trace")
    bench = Latencies(1500, async_scheduling=overlapped, max_itl_ms=5.5, record=trace)
    bench.add("a", 100, 400)
    bench.run(20)
    bench.add("bb", 3000, 1)
    bench.run()
    assert set(bench.budgets[30:100]) <= {1 + 23, 1 + 24}
    assert max(bench.gaps_s("a")[10:100]) < 0.0056
    assert Replay(trace).run().divergence is None


def test_a_goal_leaves_prompts_a_few_tokens_or_a_share() -> None:
    rates = Rates(prefill_tokens_per_s=1000.0, alone_s=0.020, token_s=0.001)
    assert rates.tokens_within(0.0305, 8, 512) == 8 + 10
    assert rates.tokens_within(0.0305, 8, 512, share=0.5) == 8 + 5
    assert rates.tokens_within(0.0305, 8, 12) == 12
    assert rates.tokens_within(0.0211, 8, 512) == 8 + MIN_CHUNK
    assert rates.tokens_within(0.020, 8, 512) == 8 + MIN_PREFILL_TOKENS, "whatever is done, the goal is missed"
    assert rates._replace(token_s=0.0).tokens_within(0.0305, 8, 512) == 8 + 10


def test_prompts_alone_are_computed_at_full_speed() -> None:
    bench = Latencies(1000, max_itl_ms=1)
    bench.add("a", 3000, 1)
    bench.run()
    assert bench.budgets == [CHUNK] * 5 + [3000 - 5 * CHUNK]


def test_a_policy_may_ask_for_less() -> None:
    rates = Rates(prefill_tokens_per_s=10_000)
    assert [rates.tokens_within(0.01, 40, most) for most in (1000, 100, 60)] == [100, 100, 60]
    assert rates.tokens_within(0.001, 40, 1000) == 40 + MIN_PREFILL_TOKENS
    assert Rates().tokens_within(0.001, 40, 1000) == 1000


class Steps:
    """Steps in flight, and the rate that their results teach."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.rate = PrefillRate()

    def schedule(self, *num_tokens: int) -> None:
        entries = [Continue(handle, count, []) for handle, count in enumerate(num_tokens)]
        self.add(entries, sum(num_tokens))

    def add(self, entries: abc.Sequence[Continue | Draft], num_tokens: int) -> None:
        """Sequences of one token, and those with drafts, sample."""
        ones = (each for each in entries if isinstance(each, Draft) or each.num_tokens == 1)
        sequences = [cast(Sequence, each) for each in ones]
        drafted = [(cast(Sequence, each), each.max_drafts) for each in entries if isinstance(each, Draft)]
        output = SchedulerOutput(1, 1, [], list(entries))
        only_decodes = num_tokens == len(sequences)
        self.in_flight.add(output, sequences, num_tokens, only_decodes=only_decodes, drafted=drafted)

    def confirm(self, now_s: float, other_s: float = 0.0) -> bool:
        """The oldest step has its result. Whether it changed the rate."""
        step = self.in_flight.oldest
        step.message.other_s += other_s
        changed = step.ends_message and self.rate.measure(step.message, now_s)
        self.in_flight.confirm()
        return changed


def test_steps_of_one_message_are_timed_together() -> None:
    steps = Steps()
    for num_tokens in ((1, 1), (1, 1), (96,)):  # two of decoding before the chunk, answered with it
        steps.schedule(*num_tokens)
    steps.in_flight.send(10.0)
    assert [steps.confirm(10.5) for _ in range(3)] == [False, False, True]
    assert steps.rate.tokens_per_s == pytest.approx(100 / 0.5)


def test_decoding_and_drafting_teach_nothing_of_prompts() -> None:
    for entries in ([Continue(handle, 1, []) for handle in range(64)], [Draft(handle, 7, []) for handle in range(40)]):
        steps = Steps()
        steps.add(list(entries), 64 if len(entries) == 64 else 320)
        steps.in_flight.send(1.0)
        assert steps.confirm(2.0)
        assert (steps.rate.alone_s, steps.rate.tokens_per_s) == (1.0, 0)


def test_a_result_that_was_taken_late_does_not_spoil_the_rate() -> None:
    """The engine was busy while two steps ended: the second seems to have taken no time."""
    steps = Steps()
    for sent_s in (1.0, 1.1):
        steps.schedule(100)
        steps.in_flight.send(sent_s)
    assert steps.confirm(2.0)
    steps.confirm(2.0 + 1e-9)
    assert steps.rate.tokens_per_s < 1.5 * 100


def test_time_of_other_work_in_a_step_is_not_charged_to_its_tokens() -> None:
    steps = Steps()
    plain = [Continue(0, 1, [])]
    chunk = [*plain, Continue(1, 10, [])]
    for number, (entries, took_s, other_s) in enumerate(
        [
            (plain, 5.1, 5.0),
            (plain, 0.1, 0.0),
            (chunk, 5.3, 5.0),
            (chunk, 0.3, 0.0),
            (plain, 5.0, 5.01),
            (chunk, 5.0, math.inf),
        ]
    ):
        steps.add(entries, 1 if entries is plain else 11)
        steps.in_flight.send(10.0 * number)
        steps.confirm(10.0 * number + took_s, other_s)
    assert (steps.rate.alone_s, steps.rate.token_s) == pytest.approx((0.1, 0.02))


def test_vision_beside_a_prompt_says_nothing_of_prompts() -> None:
    steps = Steps()
    for number, other_s in enumerate((0.0, 5.0)):
        steps.add([Continue(0, 1, []), Continue(1, 100, [])], 101)
        steps.in_flight.send(10.0 * number)
        steps.confirm(10.0 * number + 1.01 + other_s, other_s)
        assert steps.rate.tokens_per_s == pytest.approx(100.0)


def test_next_tokens_take_less_where_steps_with_prompts_do() -> None:
    """Many streams took long, and all but one have ended. Every step has a prompt as well, so none shows the time of
    the stream alone."""
    steps = Steps()
    plain = [Continue(0, 1, [])]
    chunk = [*plain, Continue(1, 32, [])]
    for number in range(40):
        steps.add(chunk if number else plain, 33 if number else 1)
        steps.in_flight.send(float(number))
        steps.confirm(number + (0.008 if number else 0.060))
    assert steps.rate.alone_s < 0.009
    rates = steps.rate.rates(Rates())
    assert rates.tokens_within(0.050, 1, 512) > 100
