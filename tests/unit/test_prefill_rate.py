"""The rate at which prompts are computed: learned from steps one behind another, and what `auto` makes of it."""

from pathlib import Path

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Sizes
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.prefill_rate import PrefillRate
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

    def __init__(self, num_blocks: int, **settings: object) -> None:
        config = EngineConfig.check({"device": "cpu", "max_num_batched_tokens": CHUNK, **settings})
        config = config.resolve(max_position_embeddings=8192, dtype="float32", model_path="m")
        ready = Ready(0, num_blocks, 1, (KVGroupInfo("full", 1),), 8192, 32_000, ())
        self.clock = VirtualClock(100.0)
        self.executor = SimulatedExecutor(ready, self.clock, COST)
        self.core = EngineCore(config, ready, self.executor, Sizes(num_blocks, 2000, 40_000), 1, self.clock)

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.core.add(b"client", Generate(name, pack_tokens([len(name)] * num_prompt), params))

    def run(self) -> None:
        while self.core.scheduler.has_requests():
            while self.core.begin():
                pass
            self.clock.advance_to(self.executor.next_result_s or 0.0)
            while (output := self.executor.poll()) is not None:
                self.core.finish(output)
        self.core.close()

    @property
    def rate(self) -> float:
        return self.core.scheduler.rates.prefill_tokens_per_s


@pytest.mark.parametrize("overlapped", [True, False])
def test_the_rate_is_that_of_a_step_by_itself(overlapped: bool) -> None:
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


def message(*num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(1, 1, [], [Continue(handle, count, []) for handle, count in enumerate(num_tokens)])


def test_steps_of_one_message_are_timed_together() -> None:
    rate = PrefillRate()
    for _ in range(2):  # one of decoding before the chunk, answered with it
        rate.scheduled(message(1, 1), 2, only_decodes=True)
    rate.scheduled(message(96), 96, only_decodes=False)
    rate.sent(10.0)
    assert [rate.ended(10.5) for _ in range(3)] == [False, False, True]
    assert rate.tokens_per_s == pytest.approx(100 / 0.5)


def test_decoding_and_guessing_teach_nothing_of_prompts() -> None:
    rate = PrefillRate()
    drafts = SchedulerOutput(1, 1, [], [Draft(handle, 7, []) for handle in range(40)])
    for step, num_tokens, only_decodes in ((message(*[1] * 64), 64, True), (drafts, 320, False)):
        rate.scheduled(step, num_tokens, only_decodes=only_decodes)
        rate.sent(1.0)
        assert not rate.ended(2.0)
    assert rate.tokens_per_s == 0


def test_a_result_that_was_taken_late_does_not_spoil_the_rate() -> None:
    """The engine was busy while two steps ended: the second seems to have taken no time."""
    rate = PrefillRate()
    for sent_s in (1.0, 1.1):
        rate.scheduled(message(100), 100, only_decodes=False)
        rate.sent(sent_s)
    assert rate.ended(2.0)
    rate.ended(2.0 + 1e-9)
    assert rate.tokens_per_s < 1.5 * 100
