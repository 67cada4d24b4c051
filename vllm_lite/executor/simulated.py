"""SimulatedExecutor: an executor without workers. Each step takes the time of a cost model, on a virtual clock.

The same EngineCore runs on it as on real workers; only the model is missing. It does not check its steps
(tests/simulated_worker.py does).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_lite.executor.base import Failure
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import AdapterRead, BeginProfile, EndProfile, Profiled, Ready, StepTiming
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Draft, Finish, Fork, ModelOutput, NewRequest, Resume, SchedulerOutput
from vllm_lite.protocol.transfers import Transfer, TransferAnswer
from vllm_lite.transport.interface import Pollable

NextToken = Callable[[Sampling, int], int]
"""Chooses the token that the simulated model samples at a position of a sequence."""


class VirtualClock:
    """A clock that only advance_to() moves, never backwards. Call it for the time in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class CostModel(NamedTuple):
    """Time of a step: `step_s`, plus a time for each computed token and each moved block."""

    step_s: float = 0.005
    token_s: float = 20e-6
    block_op_s: float = 0.0


@dataclass(slots=True)
class SimulatedSequence:
    """Number of a sequence's tokens, and of those with computed KV."""

    num_tokens: int
    num_computed: int
    sampling: Sampling
    is_pooled: bool = False


class SimulatedExecutor:
    """Runs steps one after the other on `clock`; poll() returns a result once its time has come.

    The caller advances the clock: to next_result_s, or to the next arrival if that is sooner. No draft is accepted.
    Beams get the same candidates at every step.
    """

    def __init__(
        self,
        ready: Ready,
        clock: VirtualClock,
        cost: CostModel | None = None,
        next_token: NextToken | None = None,
        swap_blocks_per_s: float = 0.0,
    ) -> None:
        self.clock = clock
        self.cost = cost or CostModel()
        self.busy_s = 0.0
        """Seconds spent in steps."""
        self._ready = ready
        self._next_token = next_token or (
            lambda sampling, position: (31 * position + sampling.sample) % ready.vocab_size
        )
        self._swap_blocks_per_s = swap_blocks_per_s
        self._free_at_s = 0.0
        self._sequences: dict[int, SimulatedSequence] = {}
        self._results: deque[tuple[float, ModelOutput]] = deque()
        self._adapters: list[AdapterRead] = []

    def spawn(self) -> None:
        pass

    def is_prepared(self) -> bool:
        return True

    def begin_load(self, timeout_s: float, model: str | None = None) -> None:
        pass

    def ready(self) -> Ready | None:
        return self._ready

    def begin_allocate(self, num_blocks: int, num_host_blocks: int, timeout_s: float) -> None:
        pass

    def started(self) -> float | None:
        return self._swap_blocks_per_s

    def timings(self) -> tuple[StepTiming, ...]:
        return ()

    def submit(self, *steps: SchedulerOutput) -> None:
        cost = self.cost
        for step in steps:
            num_tokens, result = self._run(step)
            took_s = cost.step_s + num_tokens * cost.token_s + len(step.block_ops) * cost.block_op_s
            self.busy_s += took_s
            self._free_at_s = max(self._free_at_s, self.clock.now_s) + took_s
            self._results.append((self._free_at_s, result))

    def poll(self) -> ModelOutput | None:
        if not self._results or self._results[0][0] > self.clock.now_s:
            return None
        return self._results.popleft()[1]

    @property
    def next_result_s(self) -> float | None:
        """Time at which poll() will have a result; None if no step is in flight."""
        return self._results[0][0] if self._results else None

    def pollables(self) -> tuple[Pollable, ...]:
        return ()

    def read_adapter(self, number: int, name: str, path: str) -> None:  # noqa: ARG002 (nothing is read)
        self._adapters.append(AdapterRead(0, 0, number))

    def drop_adapter(self, number: int) -> None:
        pass

    def adapters_read(self) -> list[AdapterRead]:
        read, self._adapters = self._adapters, []
        return read

    def transfer(self, message: Transfer) -> None:
        pass

    def transferred(self) -> list[TransferAnswer]:
        return []

    def profile(self, message: BeginProfile | EndProfile) -> None:
        pass

    def profiled(self) -> list[Profiled] | None:
        return [Profiled(0, 0, "a simulation has nothing to profile")]

    def expert_tokens(self) -> list[list[int]]:
        return []

    def failure(self) -> Failure | None:
        return None

    def end(self) -> None:
        pass

    def has_ended(self) -> bool:
        return True

    def close(self) -> None:
        self._results.clear()
        self._sequences.clear()

    # ---- the model

    def _run(self, output: SchedulerOutput) -> tuple[int, ModelOutput]:
        """Run a step. Returns the number of tokens that it computes, and its result."""
        total, tokens, counts, drafted = 0, list[int](), list[int](), list[int]()
        logprobs: list[TokenLogprobs | None] | None = None
        sequences, next_token = self._sequences, self._next_token
        for entry in output.entries:
            made = right = 0
            if isinstance(entry, Continue):
                sequence, count = sequences[entry.handle], entry.num_tokens
            elif isinstance(entry, Draft):
                sequence, count = sequences[entry.handle], 1
                made, right = self._draft(entry)
            elif isinstance(entry, NewRequest | Resume):
                sequence, count = self._place(entry)
            else:
                self._change(entry)
                continue
            total += count + made
            sequence.num_computed += count
            if sequence.num_computed == sequence.num_tokens:
                counts.append(0 if sequence.is_pooled else 1 + right)
                drafted.append(made)
                if sequence.is_pooled:
                    continue
                for _ in range(right + 1):
                    tokens.append(next_token(sequence.sampling, sequence.num_tokens))
                    sequence.num_tokens += 1
                sequence.num_computed += right
                if sequence.sampling.logprobs is not None:
                    logprobs = logprobs or []
                    logprobs += [None] * (len(tokens) - 1 - len(logprobs))
                    logprobs.append(_candidates(sequence.sampling.logprobs, self._ready.vocab_size))
        if logprobs is not None:
            logprobs += [None] * (len(tokens) - len(logprobs))
        result = ModelOutput(
            output.generation,
            output.step,
            pack_tokens(tokens),
            counts=counts if len(counts) != len(tokens) or any(drafted) else None,
            logprobs=logprobs,
            drafted=drafted if any(drafted) else None,
        )
        return total, result

    def _draft(self, entry: Draft) -> tuple[int, int]:
        """Numbers of (drafted, accepted) tokens of a sequence."""
        return entry.max_drafts, 0

    def _place(self, entry: NewRequest | Resume) -> tuple[SimulatedSequence, int]:
        if isinstance(entry, NewRequest):
            self._sequences[entry.handle] = SimulatedSequence(
                len(entry.tokens) // 4, 0, entry.sampling, entry.pooling is not None
            )
        sequence = self._sequences[entry.handle]
        sequence.num_computed = entry.num_computed
        return sequence, entry.num_tokens

    def _change(self, entry: object) -> None:
        if isinstance(entry, Finish):
            del self._sequences[entry.handle]
        elif isinstance(entry, Fork):
            self._sequences[entry.child] = SimulatedSequence(entry.num_tokens, entry.num_computed, entry.sampling)


def _candidates(count: int, vocab_size: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, 1, tuple((token % vocab_size, -1.0 - token) for token in range(count)))
