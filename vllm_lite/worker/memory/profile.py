"""The memory profile: the number of KV blocks that a device has room for, its arithmetic, and a report.

On a GPU the worker loads the weights, runs the largest step that the engine may send, and measures its memory:

    peak       = the framework's allocated peak + what the device has in use outside the framework
    available  = total * gpu_memory_utilization - peak - what is set aside
    num_blocks = int(available // block_bytes), at least 0

"Outside" is the CUDA context, compiled kernels, other libraries, and other processes on the same device. Set aside is
memory that this step does not use: scratch memory of attention over the longest contexts, and CUDA graphs. On a CPU
nothing is profiled: the user sets the size of the KV cache. The numbers come from a `DeviceMemory`, so that all of this
is tested without a device.
"""

import gc
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from vllm_lite.checkpoint.model_spec import LayerGroup
from vllm_lite.checkpoint.sizing import MIN_BLOCKS
from vllm_lite.config import GIB, ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log

logger = log.get(__name__)


class DeviceMemory(Protocol):
    """Reports the memory of a device and of the framework's allocator on it, in bytes."""

    def total_bytes(self) -> int:
        """Memory of the whole device."""
        ...

    def free_bytes(self) -> int:
        """Bytes of the whole device that no process uses."""
        ...

    def allocated_bytes(self) -> int:
        """Bytes of the framework's live tensors."""
        ...

    def peak_bytes(self) -> int:
        """Maximum bytes that were allocated at once since reset_peak()."""
        ...

    def reset_peak(self) -> None: ...

    def trim(self) -> None:
        """Wait for the device, and release memory that the framework caches without a live tensor in it."""
        ...


class CudaMemory:
    """Reads the numbers from the driver and torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("allocated_bytes.all.current", 0))

    def peak_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("allocated_bytes.all.peak", 0))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Baseline:
    """Numbers known before the largest step runs, in bytes."""

    initial_used_bytes: int
    """In use on the device before this worker used any of it."""
    weights_bytes: int
    scratch_bytes: int = 0
    """Set aside for attention over contexts longer than the step's."""
    graph_bytes: int = 0
    """Set aside for CUDA graphs."""
    draft_bytes: int = 0
    """Set aside for the logits of drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile(Baseline):
    """Adds the measured numbers, and computes the available memory and blocks."""

    total_bytes: int
    utilization: float
    block_bytes: int
    peak_framework_bytes: int
    """Allocated at once during the largest step; weights and fixed buffers are part of it."""
    used_at_step_bytes: int
    """In use on the device right after that step, the framework's caches included."""
    used_bytes: int
    """In use on the device after trim()."""
    framework_bytes: int
    """Allocated in live tensors at that time."""

    @property
    def activations_bytes(self) -> int:
        """Bytes that the largest step takes beside the weights, fixed buffers included."""
        return max(self.peak_framework_bytes - self.weights_bytes, 0)

    @property
    def non_framework_bytes(self) -> int:
        return max(self.used_bytes - self.framework_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        return self.peak_framework_bytes + self.non_framework_bytes

    @property
    def available_bytes(self) -> float:
        """Bytes left for the KV cache; negative if the rest is too large already."""
        return self.total_bytes * self.utilization - self.peak_bytes - self._set_aside_bytes

    @property
    def _set_aside_bytes(self) -> int:
        return self.scratch_bytes + self.graph_bytes + self.draft_bytes

    @property
    def num_blocks(self) -> int:
        return max(int(self.available_bytes // self.block_bytes), 0)

    def device_wide_num_blocks(self, swap_bytes: int) -> tuple[int, int]:
        """(device, host) blocks by a simpler formula, for comparison in the report.

        It takes all memory in use on the device after the step as the peak, including other processes' memory and the
        framework's caches.
        """
        blocks = (self.total_bytes * self.utilization - self.used_at_step_bytes) // self.block_bytes
        return max(int(blocks), 0), max(int(swap_bytes // self.block_bytes), 0)

    def lines(self, swap_bytes: int) -> tuple[str, str]:
        """Two lines for the log: the measurements under the names that dashboards know, and the use of memory."""
        measured = (
            f"memory_profile: total_gpu_memory={_gib(self.total_bytes)} "
            f"initial_memory_usage={_gib(self.initial_used_bytes)} "
            f"peak_torch_memory={_gib(self.peak_framework_bytes)} "
            f"memory_usage_post_profile={_gib(self.used_bytes)} "
            f"non_torch_memory={_gib(self.non_framework_bytes)} "
            f"kv_cache_size={_gib(self.available_bytes)} "
            f"gpu_memory_utilization={self.utilization:.2f}"
        )
        device_wide, host = self.device_wide_num_blocks(swap_bytes)
        split = (
            f"memory: weights {_gib(self.weights_bytes)}, activations {_gib(self.activations_bytes)}, attention over "
            f"long contexts {_gib(self.scratch_bytes)}, CUDA graphs {_gib(self.graph_bytes)}, logits of drafts "
            f"{_gib(self.draft_bytes)}, outside the framework {_gib(self.non_framework_bytes)}, KV cache "
            f"{_gib(self.num_blocks * self.block_bytes)} = {self.num_blocks} blocks of "
            f"{self.block_bytes / 2**20:.2f} MiB ({device_wide} if all memory in use counted), host tier {host} blocks"
        )
        return measured, split

    def check(self, min_blocks: int = MIN_BLOCKS) -> None:
        """Raise ConfigError, with flags that would work, if fewer than `min_blocks` blocks fit."""
        if self.num_blocks >= min_blocks:
            return
        needed = self.peak_bytes + self._set_aside_bytes + min_blocks * self.block_bytes
        enough = math.ceil(100 * needed / self.total_bytes) / 100
        advice = "a smaller --max-num-batched-tokens or --max-num-seqs, a smaller model, or --quantization int8"
        if enough <= 1:
            advice = f"--gpu-memory-utilization {enough:.2f} or more, {advice}"
        raise ConfigError(
            f"no memory for KV blocks: gpu_memory_utilization {self.utilization:.2f} allows "
            f"{_gib(self.total_bytes * self.utilization)} of {_gib(self.total_bytes)}; weights take "
            f"{_gib(self.weights_bytes)}, activations {_gib(self.activations_bytes)}, attention over long contexts "
            f"{_gib(self.scratch_bytes)}, CUDA graphs {_gib(self.graph_bytes)}, logits of drafts "
            f"{_gib(self.draft_bytes)}, and {_gib(self.non_framework_bytes)} are used outside of the framework, so "
            f"{self.num_blocks} blocks of {self.block_bytes} bytes fit and {min_blocks} are needed; give {advice}"
        )


def check_free(memory: DeviceMemory, utilization: float) -> int:
    """Bytes in use on the device. Raises ConfigError if this worker's share is not free."""
    total, free = memory.total_bytes(), memory.free_bytes()
    if free < total * utilization:
        possible = math.floor(100 * free / total) / 100
        advice = f"give --gpu-memory-utilization {possible:.2f} or less" if possible > 0 else "use another device"
        raise ConfigError(
            f"{_gib(free)} of the GPU's {_gib(total)} are free, and gpu_memory_utilization {utilization:.2f} asks for "
            f"{_gib(total * utilization)}; other processes use {_gib(total - free)}: end them, or {advice}"
        )
    return total - free


def profile_memory(
    memory: DeviceMemory, run_largest_step: Callable[[], None], baseline: Baseline, utilization: float, block_bytes: int
) -> MemoryProfile:
    """Run the largest step and measure. The weights are loaded, the KV cache is not allocated yet."""
    memory.trim()
    memory.reset_peak()
    run_largest_step()
    total = memory.total_bytes()
    peak_framework = memory.peak_bytes()
    used_at_step = total - memory.free_bytes()
    memory.trim()
    return MemoryProfile(
        total_bytes=total,
        utilization=utilization,
        block_bytes=block_bytes,
        peak_framework_bytes=peak_framework,
        used_at_step_bytes=used_at_step,
        used_bytes=total - memory.free_bytes(),
        framework_bytes=memory.allocated_bytes(),
        **asdict(baseline),
    )


def blocks_for(num_tokens: int, groups: Sequence[LayerGroup], block_size: int, chunk: int) -> int:
    """Number of blocks that one sequence needs at once, null block included, computed `chunk` tokens at a time."""
    whole = -(-num_tokens // block_size)
    windows = [group.window for group in groups]
    return 1 + sum(whole if w is None else min(whole, -(-(w - 1 + chunk) // block_size) + 1) for w in windows)


def warn_if_short(num_blocks: int, block_bytes: int, groups: Sequence[LayerGroup], config: ResolvedConfig) -> None:
    """Warn if no sequence of max_model_len fits. The engine then serves, and publishes, the length that does."""
    length, block_size, chunk = config.max_model_len, config.block_size, config.max_num_batched_tokens
    needed = blocks_for(length, groups, block_size, chunk)
    if needed <= num_blocks:
        return
    fitting = bisect(range(1, length), num_blocks, key=lambda count: blocks_for(count, groups, block_size, chunk))
    logger.warning(
        "one sequence of max_model_len %d needs %.1f MiB of KV cache and there are %.1f MiB: sequences of at most %d "
        "tokens are served; give --max-model-len %d to say so, or more memory",
        length,
        needed * block_bytes / 2**20,
        num_blocks * block_bytes / 2**20,
        fitting,
        max(fitting, 1),
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}GiB"
