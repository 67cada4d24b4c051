"""The engine core against a simulated executor: how many requests a second it schedules, without any model.

`python benchmarks simulated --num-requests 1000000` runs a million.
"""

import time
from collections.abc import Iterator
from typing import Any

from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.request import Produced
from vllm_lite.executor.simulated import CostModel, SimulatedExecutor, VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams

VOCAB_SIZE = 32_000


class Simulation:
    """A core, its executor and their clock. Requests arrive at their times; the clock jumps to the next event."""

    def __init__(self, num_blocks: int = 20_000, cost: CostModel | None = None, **settings: Any) -> None:
        values = {"max_num_seqs": 256, "max_num_batched_tokens": 8192} | settings
        config = EngineConfig.check(values).resolve(
            max_position_embeddings=4096, dtype="float32", model_path="simulated"
        )
        ready = Ready(0, 1, num_blocks, 1, (KVGroupInfo("full", 1),), 4096, VOCAB_SIZE, ())
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(ready, self.clock, cost)
        self.core = EngineCore(config, ready, self.executor, PoolSizes(num_blocks), Lives(), self.clock)

    def run(self, arrivals: Iterator[tuple[float, Generate]]) -> Iterator[Produced]:
        """Serve `arrivals`, pairs (time, request) in order of time, until all have ended. Yields the output of each
        step."""
        core, clock = self.core, self.clock
        coming = next(arrivals, None)
        while True:
            while coming is not None and coming[0] <= clock.now_s:
                core.add(b"simulation", coming[1])
                coming = next(arrivals, None)
            yield from core.expire()
            output = self.executor.poll()
            if output is not None:
                yield from core.finish(output)
            while core.begin():
                pass
            times = [time_s for time_s in (self.executor.next_result_s, coming[0] if coming else None) if time_s]
            if not times:
                return
            clock.advance_to(min(times))


def short_requests(count: int, per_s: float) -> Iterator[tuple[float, Generate]]:
    """Yield requests with prompts of 24 tokens and 4 tokens of output. The first 16 tokens of a prompt are one of 100
    prefixes."""
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
    heads = [pack_tokens([head + 1] * 16) for head in range(100)]
    for index in range(count):
        tail = pack_tokens([index % VOCAB_SIZE, *([7] * 7)])
        yield index / per_s, Generate(f"r{index}", heads[index % 100] + tail, params)


def run(num_requests: int) -> dict[str, float]:
    """Measure requests per second of real time. The result also has counts of the simulation."""
    simulation = Simulation()
    start = time.perf_counter()
    ended = sum(item.reason is not None for item in simulation.run(short_requests(num_requests, per_s=3_000.0)))
    took_s = time.perf_counter() - start
    simulation.core.scheduler.check_integrity()
    if ended != num_requests:
        raise RuntimeError(f"{num_requests} requests came, {ended} ended")
    counters = simulation.core.scheduler.counters
    return {
        "requests": num_requests,
        "requests_per_s": round(num_requests / took_s, 1),
        "steps": counters.steps,
        "generated_tokens": counters.generated_tokens,
        "cached_tokens": counters.cached_tokens,
        "simulated_s": round(simulation.clock.now_s, 3),
        "took_s": round(took_s, 3),
    }


def table(figures: dict[str, float]) -> str:
    return "\n".join(f"{name:<20}{value:>14,}" for name, value in figures.items())
