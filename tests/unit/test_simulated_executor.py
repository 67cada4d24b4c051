"""The simulated executor runs the real core on a virtual clock."""

import random

import pytest
from micro.simulated import Simulation, run, short_requests

from tests.recorded import EOS, VOCAB
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.executor import blocking
from vllm_lite.executor.base import Executor
from vllm_lite.executor.simulated import CostModel, SimulatedExecutor, VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import Sampling, SamplingParams
from vllm_lite.protocol.step import Continue, Fork, NewRequest, SchedulerOutput

READY = Ready(0, 1, 40, 64, (KVGroupInfo("full", 1),), 1000, VOCAB, EOS)
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def new(handle: int, num_tokens: int, total: int | None = None) -> NewRequest:
    return NewRequest(handle, pack_tokens([1] * (total or num_tokens)), 3, GREEDY, 0, 0, num_tokens, [[1]])


def test_the_simulation_implements_executor() -> None:
    clock = VirtualClock()
    executor: Executor = SimulatedExecutor(READY, clock, swap_blocks_per_s=9.0)
    assert blocking.load(executor, 1.0) is READY
    assert blocking.allocate(executor, 40, 0, 1.0) == 9.0
    assert list(executor.pollables()) == []
    executor.close()
    executor.close()


def test_a_step_has_the_time_of_the_cost_model() -> None:
    clock = VirtualClock(10.0)
    executor = SimulatedExecutor(READY, clock, CostModel(step_s=1.0, token_s=0.5, block_op_s=0.25))
    assert executor.next_result_s is None
    executor.submit(SchedulerOutput(0, 1, [(1, 2, 3)], [new(0, 4), new(1, 2)]))
    executor.submit(SchedulerOutput(0, 2, [], [Continue(0, 1, [])]))
    assert executor.next_result_s == 10.0 + 1.0 + 6 * 0.5 + 0.25
    assert executor.poll() is None
    clock.advance_to(14.25)
    first = executor.poll()
    assert first is not None
    assert (first.step, len(first.tokens)) == (1, 8)
    assert executor.poll() is None, "steps run one after the other"
    assert executor.next_result_s == 14.25 + 1.5
    assert executor.busy_s == 5.75


def test_only_sequences_with_all_tokens_computed_get_a_token() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(READY, clock, CostModel(0.0, 0.0), lambda _sampling, position: position)
    executor.submit(SchedulerOutput(0, 1, [], [new(0, 4, total=6), new(1, 3)]))
    executor.submit(
        SchedulerOutput(0, 2, [], [Fork(1, 2, GREEDY, 3, 2, 3), *(Continue(handle, 1, []) for handle in (0, 1, 2))])
    )
    executor.submit(SchedulerOutput(0, 3, [], [Continue(0, 1, [])]))
    outputs = [executor.poll() for _ in range(3)]
    assert [output.tokens for output in outputs if output] == [pack_tokens(t) for t in ([3], [4, 3], [6])]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_the_simulation_serves_every_call_of_the_core(async_scheduling: bool, preemption_mode: str) -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(READY, clock)
    settings = {"block_size": 4, "async_scheduling": async_scheduling, "preemption_mode": preemption_mode}
    config = EngineConfig.check({**settings, "max_num_seqs": 6, "max_num_batched_tokens": 20})
    config = config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
    core = EngineCore(config, READY, executor, PoolSizes(12, 20, 50.0), Lives(), clock)
    rng = random.Random(2)
    ends: dict[tuple[str, int], str] = {}
    for index in range(60):
        params = SamplingParams(max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2]), use_beam_search=index % 7 == 0)
        prompt = pack_tokens([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))])
        core.add(b"c", Generate(f"r{index}", prompt, params))
    for _ in range(5000):
        while core.begin():
            pass
        if executor.next_result_s is None:
            break
        clock.advance_to(executor.next_result_s)
        output = executor.poll()
        assert output is not None
        for item in core.finish(output):
            if item.reason:
                ends[item.request.request_id, item.sample] = item.reason
        core.scheduler.check_integrity()
    assert not core.scheduler.requests
    assert {name for name, _ in ends} == {f"r{index}" for index in range(60)}
    assert core.scheduler.counters.preemptions > 0


def test_time_is_simulated_and_the_same_every_time() -> None:
    times = []
    for _ in range(2):
        simulation = Simulation(cost=CostModel(step_s=0.5, token_s=0.0))
        ended = [item for item in simulation.run(short_requests(100, per_s=10.0)) if item.reason]
        assert len(ended) == 100
        times.append((simulation.clock.now_s, simulation.core.scheduler.step))
    assert times[0] == times[1]
    assert 9.9 < times[0][0] < 13.0


def test_thousands_of_requests_share_their_prefixes() -> None:
    figures = run(4_000)
    assert figures["generated_tokens"] == 16_000
    assert figures["cached_tokens"] > 15 * 3_800
