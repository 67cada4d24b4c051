"""Device: a worker's torch device, with the interfaces that tests replace: its memory, and the capture of graphs."""

import os
from dataclasses import dataclass

import torch

from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.worker.graphs import Capture, CpuCapture, CudaCapture
from vllm_lite.worker.memory.profile import CudaMemory, DeviceMemory

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""Resolved value of kv_cache_dtype -> torch dtype."""


@dataclass(frozen=True, slots=True)
class Device:
    """The torch device; `memory` to be profiled and `capture` for graphs, if the device has them."""

    torch: torch.device
    memory: DeviceMemory | None = None
    capture: Capture | None = None


def open_device(config: ResolvedConfig, rank: int) -> Device:
    """Open the device of worker `rank` and make it current. Raises ConfigError if torch does not see it."""
    if config.device == "cpu":
        recordable = cpu.available() and not config.enforce_eager
        return Device(torch.device("cpu"), capture=CpuCapture() if recordable else None)
    device = torch.device("cuda", _device_of(config, rank))
    torch.cuda.set_device(device)
    return Device(device, CudaMemory(device), None if config.enforce_eager else CudaCapture(device))


def _device_of(config: ResolvedConfig, rank: int) -> int:
    """Index of the visible device of `rank`: one per rank; ranks share one only if they communicate by gloo."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ConfigError(
            f"device is cuda, but torch {torch.__version__} sees no CUDA device; give --device cpu, or install a torch "
            "with CUDA that fits the driver"
        )
    if config.distributed_executor_backend == "ray":
        return 0  # a worker sees only the device that Ray has assigned
    if config.single_process and config.ranks_on_machine > 1 and min(count, config.ranks_on_machine) > 1:
        raise ConfigError(
            f"single_process has {config.ranks_on_machine} workers in one process, whose kernels are loaded for one "
            f"GPU, and torch sees {count}; give every worker a process of its own (no --single-process), or have them "
            "share one GPU (CUDA_VISIBLE_DEVICES=0 and --tensor-parallel-backend gloo)"
        )
    if config.tensor_parallel_backend == "gloo":
        return (config.first_rank + rank) % count
    if config.ranks_on_machine > count:
        engines = f"data_parallel_size is {config.data_parallel_size} and " if config.data_parallel_size > 1 else ""
        raise ConfigError(
            f"{engines}tensor_parallel_size is {config.tensor_parallel_size}, but torch sees {count} CUDA devices, and "
            "every worker needs one of its own; give a smaller size, make more devices visible (CUDA_VISIBLE_DEVICES), "
            "or let workers share them with --tensor-parallel-backend gloo, which is slow"
        )
    return config.first_rank + rank


def set_threads(cpu_threads: int | None, num_cores: int, binds: bool = True) -> int:
    """Set the threads of torch and the native kernels: `cpu_threads`, else OMP_NUM_THREADS, else `num_cores`. `binds`:
    see kernels.cpu.set_num_threads.

    runtime/cpu_binding.py sets that variable in a worker's process. Returns the number.
    """
    if cpu_threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cpu_threads or num_cores)
    num_threads = torch.get_num_threads()
    if cpu.available():
        cpu.set_num_threads(num_threads, binds)
    return num_threads
