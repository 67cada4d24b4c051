"""Simulation: a core of the engine, workers that only take time, and clients, on a virtual clock."""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.request import Produced
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.executor.simulated import SimulatedExecutor, VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import SchedulerOutput
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.simulate.cost import StepTimer, StepTimes
from vllm_lite.tools.simulate.features import StepReader
from vllm_lite.tools.simulate.load import TOKEN_BITS, SimulatedRequest, largest
from vllm_lite.tools.simulate.recording import take
from vllm_lite.trace.records import Header

VARIED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "preemption_mode",
    "scheduling_policy",
    "max_itl_ms",
    "kv_watermark",
    "max_swap_blocks_per_step",
    "num_gpu_blocks_override",
    "async_scheduling",
)
"""The settings of the engine that a simulation may have other than the recording. With others a step takes another
time, which only a recording with them can tell."""


class TimedExecutor(SimulatedExecutor):
    """Workers whose messages take the times that were fitted. The results of a message come together."""

    def __init__(self, ready: Ready, clock: VirtualClock, fitted: StepTimes, timer: StepTimer) -> None:
        super().__init__(ready, clock, swap_blocks_per_s=fitted.header.swap_blocks_per_s)
        self._timer = timer
        self._engine_s = fitted.engine_s
        self._reader = StepReader()

    def submit(self, *steps: SchedulerOutput) -> None:
        results = [self._run(step)[1] for step in steps]
        counted = [(step, len(result.tokens) // 4) for step, result in zip(steps, results, strict=True)]
        was_idle = not self._results
        took_s = self._timer.took_s(self._reader.message(counted, was_idle=was_idle))
        self.busy_s += took_s
        self._free_at_s = max(self._free_at_s, self.clock.now_s + self._engine_s) + took_s
        self._results.extend((self._free_at_s, result) for result in results)


class Simulation:
    """One run of one load. Clients send at their times, but no more at once than `max_concurrency`."""

    def __init__(
        self,
        fitted: StepTimes,
        settings: Mapping[str, Any],
        timer: StepTimer,
        max_concurrency: int | None = None,
        record: str | None = None,
    ) -> None:
        """`settings` are EngineConfig's, and override the recorded ones. `record`: write a trace there. Raises
        ConfigError."""
        self.clock = VirtualClock()
        config, ready, sizes = engine_of(fitted.header, settings)
        config = msgspec.structs.replace(config, record=record)
        self.executor = TimedExecutor(ready, self.clock, fitted, timer)
        self.core = EngineCore(config, ready, self.executor, sizes, Lives(), self.clock)
        self.kv_used: list[tuple[float, float]] = []
        """The share of the blocks that are in use, at times in seconds, one for each step that changed it by a
        hundredth."""
        self._client_s = fitted.client_s
        self._max_concurrency = max_concurrency or 1 << 60

    def run(self, load: Sequence[SimulatedRequest], report: Callable[[int], None] = lambda _: None) -> list[Outcome]:
        """Serve `load`, in order of time. Returns the outcomes in the same order; `report` is called
        with the number of requests that have just ended. Raises ConfigError for a request that the engine refuses."""
        if (most := largest(load)) > self.core.max_model_len:
            raise ConfigError(
                f"a request has {most} tokens with its answer, the engine takes {self.core.max_model_len}"
            )
        clients = _Clients(load, self._client_s, self._max_concurrency)
        while True:
            for number in clients.due(self.clock.now_s):
                self._add(number, load[number])
            ended = clients.take(self._step(), self.clock.now_s)
            if ended:
                report(ended)
            times = [time_s for time_s in (self.executor.next_result_s, clients.next_s) if time_s is not None]
            if not times:
                self.core.close()
                return clients.outcomes
            self.clock.advance_to(min(times))

    def _add(self, number: int, request: SimulatedRequest) -> None:
        params = SamplingParams(max_tokens=request.output_len, temperature=0.0, seed=0, ignore_eos=True)
        try:
            self.core.add(b"simulation", Generate(str(number), request.tokens, params))
        except RequestError as error:
            raise ConfigError(f"the engine refuses a request of {len(request.tokens) // 4} tokens: {error}") from error

    def _step(self) -> list[Produced]:
        core, produced = self.core, list[Produced]()
        while (output := self.executor.poll()) is not None:
            produced += core.finish(output)
        while core.begin():
            pass
        used = core.kv.pool.num_used / core.kv.pool.num_usable
        if not self.kv_used or abs(used - self.kv_used[-1][1]) >= 0.01:
            self.kv_used.append((self.clock.now_s, used))
        return produced


class _Clients:
    """Sends requests, and takes the answers. A first token has been under way for `client_s` when it is there."""

    def __init__(self, load: Sequence[SimulatedRequest], client_s: float, max_concurrency: int) -> None:
        self.outcomes = [Outcome(len(each.tokens) // 4) for each in load]
        self._load = load
        self._client_s = client_s
        self._free = max_concurrency
        self._next = 0
        self._waiting: deque[int] = deque()
        self._under_way: list[tuple[float, int]] = []
        """When the engine has each request that was sent."""

    def due(self, now_s: float) -> list[int]:
        """The requests that come to the engine at this time."""
        while self._next < len(self._load) and self._load[self._next].time_s <= now_s:
            self._waiting.append(self._next)
            self._next += 1
        while self._waiting and self._free > 0:
            self._free -= 1
            number = self._waiting.popleft()
            outcome = self.outcomes[number]
            outcome.start_s, outcome.chunks_s = now_s, array("d")
            heapq.heappush(self._under_way, (now_s + self._client_s, number))
        found = list[int]()
        while self._under_way and self._under_way[0][0] <= now_s:
            found.append(heapq.heappop(self._under_way)[1])
        return found

    def take(self, produced: Sequence[Produced], now_s: float) -> int:
        """Returns how many requests have ended."""
        ended = 0
        for item in produced:
            take(self.outcomes[int(item.request.request_id)], item, now_s)
            ended += item.reason is not None
        self._free += ended
        return ended

    @property
    def next_s(self) -> float | None:
        """When there is something to do next; None if that waits for an answer."""
        times = [self._under_way[0][0]] if self._under_way else []
        if self._next < len(self._load):
            times.append(self._load[self._next].time_s)
        if self._waiting and self._free > 0:
            times.append(0.0)
        return min(times, default=None)


def engine_of(header: Header, settings: Mapping[str, Any]) -> tuple[ResolvedConfig, Ready, PoolSizes]:
    """The engine that was recorded, with other `settings`. Raises ConfigError."""
    if unknown := settings.keys() - set(VARIED):
        raise ConfigError(f"{', '.join(sorted(unknown))} cannot be varied: one of {', '.join(VARIED)}")
    options = header.options
    recorded = {
        "max_num_seqs": options["max_num_seqs"],
        "max_num_batched_tokens": options["max_num_batched_tokens"],
        "enable_chunked_prefill": options["chunked_prefill"],
        "preemption_mode": options["preemption"],
        "max_itl_ms": 1000 * options["max_itl_s"] or None,
        "scheduling_policy": header.policy,
        "block_size": header.block_size,
        "enable_prefix_caching": header.caching,
        "kv_watermark": header.watermark,
        "max_swap_blocks_per_step": header.max_swap_blocks_per_step,
        "jump_forward": False,
    }
    config = EngineConfig.check(recorded | dict(settings)).resolve(
        max_position_embeddings=options["max_model_len"],
        dtype="float32",
        model_path="simulated",
        machine=("cpu", 1 << 30),
    )
    num_blocks = config.num_gpu_blocks_override or header.num_blocks
    groups = tuple(KVGroupInfo("sliding" if window else "full", 1, window) for window in header.windows)
    ready = Ready(
        0,
        1,
        num_blocks,
        header.max_moved_states,
        groups,
        config.max_model_len,
        1 << TOKEN_BITS,
        (),
        num_state_slots=header.num_state_slots,
        state_bytes=header.max_swap_blocks_per_step,
        num_host_states=header.num_host_states,
    )
    return config, ready, PoolSizes(num_blocks, header.num_host_blocks, header.swap_blocks_per_s)
