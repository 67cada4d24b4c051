"""The simulated worker in a real worker's process and protocol: it starts fast, without torch.

Its tokens are a function of the whole history in its fake KV cache, which it checks position by position. As an entry
point of its own it checks nothing, and its steps take the same time for long and short histories: none, or STEP_S
without using the processor.
"""

import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.simulated_worker import History, SimulatedWorker, next_token
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.config import ResolvedConfig
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.control import KVGroupInfo, Ready, Start, Started
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker import process
from vllm_lite.worker.membership import Membership
from vllm_lite.worker.progress import Progress

BLOCK_BYTES = 8192
LAST_TOKENS = 8
STEP_S = "LIGHT_STEP_S"
"""Environment variable: seconds that a step takes, so that tests can look at running requests."""


class UncheckedWorker(SimulatedWorker):
    """Derives a token from the last few and their position, and if it is sampled at random, from sample and seed."""

    step_s = 0.0

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        time.sleep(self.step_s)
        return super().execute(output)

    def _next(self, tokens: list[int], sampling: Sampling) -> int:
        drawn = (sampling.sample, sampling.seed % 2**32) if sampling.temperature else ()
        return next_token([len(tokens), *tokens[-LAST_TOKENS:]], self.vocab_size, *drawn)

    def _logprobs(self, history: History, num_sampled: int) -> TokenLogprobs | None:
        count = history.sampling.logprobs
        if count is None:
            return None
        token = history.tokens[-num_sampled]
        best = tuple(((token + rank) % self.vocab_size, -1.0 - rank) for rank in range(count))
        return TokenLogprobs(-1.0, 1, best)

    def _write(self, history: History, count: int, drafts: list[int]) -> None: ...

    def _check_history(self, history: History, tokens: list[int], start: int, count: int) -> None: ...


class LightWorker:
    """The part of Worker that WorkerLoop uses."""

    device = SimpleNamespace(torch=None)
    disk = None
    kind: type[SimulatedWorker] = SimulatedWorker

    def __init__(self, config: ResolvedConfig, rank: int, progress: Progress, generation: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.progress = progress
        self.generation = generation

    def max_logits_bytes(self) -> int:
        return 0

    def load(self, *_: Any) -> Ready:
        spec = load_spec(self.config.model)
        self.vocab_size = spec.vocab_size
        length = self.config.max_model_len or spec.max_position_embeddings
        num_blocks = self.config.num_gpu_blocks_override or 2 * length // self.config.block_size
        sizes = num_blocks, BLOCK_BYTES, (KVGroupInfo("full", 2),), length, spec.vocab_size
        return Ready(self.rank, self.generation, *sizes, spec.eos_token_ids)

    def start(self, start: Start) -> Started:
        sizes = start.num_blocks, self.config.block_size, self.config.max_num_seqs, self.vocab_size
        self.steps = self.kind(*sizes, num_host_blocks=start.num_host_blocks)
        return Started(self.rank, self.generation, 1e6)

    def record_ahead(self) -> bool:
        return False

    def can_run_ahead(self, _: SchedulerOutput) -> bool:
        return False

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        if step.generation != self.generation:
            raise AssertionError(f"a step of generation {step.generation} came to {self.generation}")
        output = self.steps.execute(step)
        self.progress.advance()
        return output

    def run(self, steps: Sequence[SchedulerOutput]) -> list[ModelOutput]:
        return [self.execute(step) for step in steps]


def install() -> Callable[[], type[LightWorker]]:
    """Return the function that replaces the import of a real worker in this process. The worker is the only rank."""
    Membership.connect = lambda *_: None  # type: ignore[assignment, method-assign]
    return lambda: LightWorker


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    LightWorker.kind = UncheckedWorker
    UncheckedWorker.step_s = float(os.environ.get(STEP_S, "0"))
    process.import_worker = install()  # type: ignore[assignment]
    return process.process_main(settings, stop)


if __name__ == "__main__":
    run_child(main, WorkerSettings)
