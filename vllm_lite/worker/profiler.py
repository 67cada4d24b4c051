"""Profiles of a worker's steps, for /start_profile and /stop_profile: by torch, or by a tool around the worker.

A profile begins between two steps. Each recorded step takes memory, so it stops recording after MOST_STEPS, or as many
as configured; it is written when /stop_profile is called. While no profile runs, naming a part of a step costs one
call.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from vllm_lite.runtime import log
from vllm_lite.runtime.nested_settings import ProfilerConfig
from vllm_lite.worker.progress import Progress

MOST_STEPS = 2000
"""Maximum steps of a profile without max_iterations: the memory per step grows with the model's operations."""
TABLE_ROWS = 100
TICK_S = 0.5
_NOTHING: AbstractContextManager[None] = nullcontext()

logger = log.get(__name__)


class StepRanges:
    """Names the parts of a step for a profiler, while one runs."""

    def __init__(self) -> None:
        self.is_on = False
        self.profiler: Profiler | None = None

    def step(self) -> None:
        """Called when a step begins."""
        if self.profiler is not None:
            self.profiler.on_step()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return _range(name) if self.is_on else _NOTHING


@contextmanager
def _range(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


class Profiler:
    """At most one profile at a time."""

    def __init__(
        self, config: ProfilerConfig | None, rank: int, device: torch.device, ranges: StepRanges, progress: Progress
    ) -> None:
        self.config = config or ProfilerConfig()
        self._rank = rank
        self._device = device
        self._ranges = ranges
        self._progress = progress
        self._made: torch.profiler.profile | None = None
        self._is_on = False
        self._num_steps = 0

    def begin(self) -> str | None:
        """Begin a profile. Returns the reason if that is not possible, else None."""
        if self.config.profiler is None:
            return "the worker was started without a profiler"
        if self.config.profiler == "cuda" and self._device.type != "cuda":
            return f"profiler cuda needs a GPU, this worker runs on {self._device}"
        if self._is_on:
            return "a profile is on already: stop it first"
        self._is_on, self._num_steps, self._ranges.profiler = True, 0, self
        if self.config.delay_iterations == 0:
            self._listen()
        return None

    def on_step(self) -> None:
        """Called when a step begins: start or stop recording if this is the first step, or one too many."""
        delay, most = self.config.delay_iterations, self.config.max_iterations or MOST_STEPS
        if self._num_steps == delay and not self._ranges.is_on:
            self._listen()
        elif self._num_steps == delay + most:
            self._close()
            logger.info("the profile has its %d steps; it is written on /stop_profile", most)
        self._num_steps += 1

    def end(self) -> str | None:
        """End the profile and write it. Returns the reason if that is not possible, else None."""
        if not self._is_on:
            return "no profile is on: start one first"
        self._is_on, self._ranges.profiler = False, None
        try:
            with self._going_on():
                self._close()
                made, self._made = self._made, None
                if made is None:
                    return None if self.config.profiler == "cuda" else "no step has come since the profile was to begin"
                self._write(made)
        except Exception as error:  # no error of a profiler may stop the steps
            self._made = None
            return f"the profile cannot be written to {self.config.torch_profiler_dir!r}: {error}"
        return None

    def _listen(self) -> None:
        config, self._ranges.is_on = self.config, True
        if config.profiler == "cuda":
            torch.cuda.profiler.start()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._made = torch.profiler.profile(
            activities=activities,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._made.start()

    def _close(self) -> None:
        if not self._ranges.is_on:
            return
        self._ranges.is_on = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._made is not None:
            self._made.stop()
        else:
            torch.cuda.profiler.stop()

    def _write(self, made: torch.profiler.profile) -> None:
        folder = Path(self.config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
        trace = folder / (name + ".gz" * self.config.torch_profiler_use_gzip)
        made.export_chrome_trace(str(trace))
        logger.info("wrote the profile %s", trace)
        if not self.config.torch_profiler_dump_cuda_time_total:
            return
        key = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        try:
            table = made.key_averages().table(sort_by=key, row_limit=TABLE_ROWS)
        except UnicodeDecodeError as error:  # torch keeps some names in stacks in another encoding
            logger.warning("no table of operations beside it: %s", error)
            return
        (folder / f"profiler_out_{self._rank}.txt").write_text(table, encoding="utf-8")

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Report progress while the worker writes a profile for many seconds."""
        done = threading.Event()

        def tick() -> None:
            while not done.wait(TICK_S):
                self._progress.advance()

        thread = threading.Thread(target=tick, name="writes a profile", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
