"""The simulated worker in a real worker's process, with its conversation: it starts fast, without torch.

Its tokens are a function of the whole history that its fake KV cache holds, which it checks position by position.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.simulated_worker import SimulatedWorker
from vllm_lite.config import ResolvedConfig
from vllm_lite.protocol.control import KVGroupInfo, Ready, Start, Started
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.worker.membership import Membership
from vllm_lite.worker.progress import Progress

VOCAB_SIZE = 384
MAX_MODEL_LEN = 512
BLOCK_BYTES = 8192


class LightWorker:
    """The part of Worker that WorkerLoop uses."""

    device = SimpleNamespace(torch=None)
    disk = None

    def __init__(self, config: ResolvedConfig, rank: int, progress: Progress, generation: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.progress = progress
        self.generation = generation

    def max_logits_bytes(self) -> int:
        return 0

    def load(self, *_: Any) -> Ready:
        groups, num_blocks = (KVGroupInfo("full", 2),), self.config.num_gpu_blocks_override or 64
        sizes = num_blocks, BLOCK_BYTES, groups, MAX_MODEL_LEN, VOCAB_SIZE
        return Ready(self.rank, self.generation, *sizes, (2,))

    def start(self, start: Start) -> Started:
        sizes = start.num_blocks, self.config.block_size, self.config.max_num_seqs, VOCAB_SIZE
        self.steps = SimulatedWorker(*sizes, num_host_blocks=start.num_host_blocks)
        return Started(self.rank, self.generation, 1e6)

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
    """Make the import that replaces a real worker's in this process, whose worker is alone."""
    Membership.connect = lambda *_: None  # type: ignore[assignment, method-assign]
    return lambda: LightWorker
