"""A worker without its process: loads its shard, says what fits, and runs steps. Told everything, deciding nothing."""

import os
import time
from pathlib import Path

import torch

from vllm_lite import log
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.select import select_backend
from vllm_lite.config import GIB, EngineConfig
from vllm_lite.errors import ConfigError, ProtocolError
from vllm_lite.model_spec import ModelSpec
from vllm_lite.models.registry import build
from vllm_lite.models.weights import load_weights
from vllm_lite.protocol.control import KVGroupInfo, Ready, Start, Started
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.worker.cache_engine import CacheEngine
from vllm_lite.worker.model_runner import ModelRunner, ObservedBackend, StepLimits
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.speculative import NgramDrafter

LOG_EVERY_S = 5.0

logger = log.get(__name__)


class Worker:
    """`load`, then `start`, then `execute` step after step. `config` is resolved: nothing is left to be guessed."""

    def __init__(self, config: EngineConfig, rank: int, progress: Progress) -> None:
        self.config = config
        self.rank = rank
        self.progress = progress
        self.spec = ModelSpec.load(config.model)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = torch.device(config.device)
        self.limits = _limits(config)
        self._epoch: int | None = None

    def load(self) -> Ready:
        """Load the weights and say what would fit beside them. Raises ModelError or ConfigError."""
        if self.config.cpu_threads is not None or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(self.config.cpu_threads or num_physical_cores())
        block_bytes = self.spec.kv_block_bytes(self.config.block_size, self.dtype.itemsize)
        num_blocks = self._num_blocks(block_bytes)
        self.backend = select_backend(self._attention_shape())
        limits = self.limits
        self.model = build(self.spec, self.dtype, self.device, limits.max_model_len, limits.max_num_tokens)
        started = time.monotonic()
        load_weights(
            self.model,
            self.config.model,
            load_format=self.config.load_format,
            seed=self.config.seed,
            progress=_LoadReport(self.progress),
        )
        logger.info(
            "%s with %.1fM parameters in %s loaded in %.2f s; %d threads, room for %d KV blocks of %.1f KiB",
            self.spec.architecture,
            self.spec.num_parameters() / 1e6,
            self.config.dtype,
            time.monotonic() - started,
            torch.get_num_threads(),
            num_blocks,
            block_bytes / 1024,
        )
        return Ready(
            rank=self.rank,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            groups=tuple(KVGroupInfo(group.kind, len(group.layers), group.window) for group in self.spec.kv_groups),
            max_model_len=limits.max_model_len,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
        )

    def start(self, start: Start) -> Started:
        """Allocate the KV cache that the engine decided on, and run once so that the first request is quick.

        Answers with how fast blocks move to and from the host.
        """
        cache_engine = CacheEngine(
            self.spec, self.config.block_size, start.num_blocks, start.num_host_blocks, self.dtype, self.device
        )
        swap_blocks_per_s = cache_engine.measure_swap()
        backend = ObservedBackend(self.backend, self.progress)
        speculation = self.config.speculative_config
        drafter = NgramDrafter(speculation) if speculation is not None else None
        self.runner = ModelRunner(self.limits, self.model, cache_engine, backend, drafter)
        self.runner.warm_up()
        self._epoch = start.epoch
        return Started(self.rank, swap_blocks_per_s)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step. Raises ProtocolError for a step of another life of the engine, or one that cannot be run."""
        if step.epoch != self._epoch:
            raise ProtocolError(f"step {step.step} is of epoch {step.epoch}, this worker's is {self._epoch}")
        output = self.runner.execute(step)
        self.progress.advance()
        return output

    def _attention_shape(self) -> AttentionShape:
        spec = self.spec
        return AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_dim,
            block_size=self.config.block_size,
            dtype=self.dtype,
            device=self.device,
            windows=tuple(group.window for group in spec.kv_groups),
        )

    def _num_blocks(self, block_bytes: int) -> int:
        """How many blocks the configuration gives the KV cache, the null block included."""
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        return int((self.config.cpu_kvcache_space or 0) * GIB // block_bytes)


class _LoadReport:
    """Turns bytes loaded into heartbeat progress, and into a line in the log every few seconds."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.next_line_s = time.monotonic() + LOG_EVERY_S

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.progress.advance()
        if time.monotonic() >= self.next_line_s:
            self.next_line_s = time.monotonic() + LOG_EVERY_S
            logger.info("loading weights: %.1f of %.1f GiB", done_bytes / GIB, total_bytes / GIB)


def _limits(config: EngineConfig) -> StepLimits:
    """A resolved config's limits."""
    if config.max_num_seqs is None or config.max_num_batched_tokens is None or config.max_model_len is None:
        raise ConfigError("the config is not resolved")
    return StepLimits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size)


def num_physical_cores() -> int:
    """Physical cores that this process may use: its affinity mask without hyper-threads, and the container's share."""
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    """The hardware threads of `cpu`'s core, as the kernel lists them; a CPU it says nothing of is its own core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """CPUs that the control group grants, rounded up; a number larger than any machine if there is no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 30
