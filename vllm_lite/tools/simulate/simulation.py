"""Simulation: engines, workers that only take time, and clients, on a virtual clock, without a model."""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_lite.engine.request import Produced
from vllm_lite.errors import ConfigError
from vllm_lite.executor.simulated import VirtualClock
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.simulate.cost import StepTimer, StepTimes
from vllm_lite.tools.simulate.engines import SimulatedEngine, SimulatedEngines
from vllm_lite.tools.simulate.load import SimulatedRequest, largest
from vllm_lite.tools.simulate.recording import take


class Simulation:
    """One run of one load. Clients send at their times, but no more at once than `max_concurrency`."""

    def __init__(
        self,
        fitted: StepTimes,
        settings: Mapping[str, Any],
        timers: Callable[[int], StepTimer],
        max_concurrency: int | None = None,
        record: str | None = None,
    ) -> None:
        """`settings` are EngineConfig's, and override the recorded ones; `timers` makes the timer of each engine.
        `record`: path for a trace of the first engine. Raises ConfigError."""
        self.clock = VirtualClock()
        count = int(settings.get("data_parallel_size", 1))

        def make(number: int) -> SimulatedEngine:
            return SimulatedEngine(fitted, settings, timers(number), self.clock, None if number else record)

        self.engines = SimulatedEngines(count, make)
        self._client_s = fitted.client_s
        self._max_concurrency = max_concurrency or 1 << 60

    def run(self, load: Sequence[SimulatedRequest], report: Callable[[int], None] = lambda _: None) -> list[Outcome]:
        """Serve `load`. Returns the outcomes in the same order; `report` is called with the number
        of requests that have just ended. Raises ConfigError for a request that the engine refuses."""
        engines, most = self.engines, largest(load)
        if most > engines.max_model_len:
            room = engines.max_model_len
            raise ConfigError(f"a request has {most} tokens with its answer, the engine takes {room}")
        clients = _Clients(load, self._client_s, self._max_concurrency)
        while True:
            for number, request in clients.due(self.clock.now_s):
                engines.add(number, request)
            ended = clients.take(engines.step(), self.clock.now_s)
            if ended:
                report(ended)
            times = [time_s for time_s in (engines.next_event_s, clients.next_s) if time_s is not None]
            if not times:
                engines.close()
                return clients.outcomes
            self.clock.advance_to(min(times))


class _Clients:
    """Sends requests and takes answers. A request takes `client_s` to reach the engine: all time of a first token
    outside of it."""

    def __init__(self, load: Sequence[SimulatedRequest], client_s: float, max_concurrency: int) -> None:
        self.outcomes = [Outcome(len(each.tokens) // 4) for each in load]
        self._load = load
        self._client_s = client_s
        self._free = max_concurrency
        self._coming = [(each.time_s, number) for number, each in enumerate(load) if each.after is None]
        heapq.heapify(self._coming)
        self._waiting: deque[int] = deque()
        self._under_way: list[tuple[float, int]] = []
        """Heap of (time at which the engine gets a request, its number)."""
        self._next_turns = {each.after: number for number, each in enumerate(load) if each.after is not None}
        self._said: dict[int, bytearray] = {}
        """Request that another one continues -> tokens of its conversation so far: its prompt, then also its answer."""

    def due(self, now_s: float) -> list[tuple[int, SimulatedRequest]]:
        """The requests that reach the engine by this time, with the tokens of their conversations."""
        while self._coming and self._coming[0][0] <= now_s:
            self._waiting.append(heapq.heappop(self._coming)[1])
        while self._waiting and self._free > 0:
            self._free -= 1
            number = self._waiting.popleft()
            outcome = self.outcomes[number]
            outcome.start_s, outcome.chunks_s = now_s, array("d")
            heapq.heappush(self._under_way, (now_s + self._client_s, number))
        found = list[tuple[int, SimulatedRequest]]()
        while self._under_way and self._under_way[0][0] <= now_s:
            number = heapq.heappop(self._under_way)[1]
            found.append((number, self._whole(number)))
        return found

    def _whole(self, number: int) -> SimulatedRequest:
        """A request with the previous turns of its conversation before its own tokens."""
        request = self._load[number]
        if request.after is not None:
            request = request._replace(tokens=bytes(self._said.pop(request.after)) + request.tokens)
            self.outcomes[number].input_len = len(request.tokens) // 4
        if number in self._next_turns:
            self._said[number] = bytearray(request.tokens)
        return request

    def take(self, produced: Sequence[Produced], now_s: float) -> int:
        """Take new tokens of the engines. Returns the number of requests that have ended."""
        ended = 0
        for item in produced:
            number = int(item.request.request_id)
            take(self.outcomes[number], item, now_s)
            if number in self._said:
                self._said[number] += array("I", item.token_ids).tobytes()
            if item.reason is not None:
                ended += 1
                if number in self._next_turns:
                    following = self._next_turns[number]
                    heapq.heappush(self._coming, (now_s + self._load[following].time_s, following))
        self._free += ended
        return ended

    @property
    def next_s(self) -> float | None:
        """Time of the next action; None if the clients wait for an answer."""
        times = [self._under_way[0][0]] if self._under_way else []
        if self._coming:
            times.append(self._coming[0][0])
        if self._waiting and self._free > 0:
            times.append(0.0)
        return min(times, default=None)
