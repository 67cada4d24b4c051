"""Clocks of the kernel benchmarks, and the speeds of memory and arithmetic to compare with.

The shortest of many calls counts, because it is the one that other processes disturbed least.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import DTYPES
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.cpu.memory import zeros

ROUND_S = 0.02

Row = dict[str, Any]
"""One figure: `kernel`, `shape`, and numbers by name."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def clock_for(num_threads: int) -> Callable[[], float]:
    """The clock to measure with: CPU time with one thread, which a busy machine hardly lengthens, else wall time."""
    return time.process_time if num_threads == 1 else time.perf_counter


def best_times(
    clock: Callable[[], float], calls: Sequence[Callable[[], object]], min_time_s: float, min_rounds: int = 3
) -> list[float]:
    """Seconds of the shortest call of each of `calls`, measured for `min_time_s` each. Every round calls all of them,
    and quick ones several times."""
    best = [float("inf")] * len(calls)
    deadline_s, rounds = time.monotonic() + min_time_s * len(calls), 0
    while rounds < min_rounds or time.monotonic() < deadline_s:
        rounds += 1
        for i, call in enumerate(calls):
            until_s = time.monotonic() + ROUND_S
            while True:
                start_s = clock()
                call()
                best[i] = min(best[i], clock() - start_s)
                if time.monotonic() > until_s:
                    break
    return best


def read_bandwidth_gb_s(num_threads: int, num_bytes: int = 512 << 20) -> float:
    """Read bandwidth of `num_threads` of our threads from memory on huge pages, in GB/s."""
    cpu.set_num_threads(num_threads)
    data = zeros(num_bytes, torch.uint8).fill_(1)
    read = function("vllm_lite_read", (pointer, int64), int64)
    (seconds,) = best_times(clock_for(num_threads), [lambda: read(data.data_ptr(), num_bytes)], 0, min_rounds=8)
    return num_bytes / seconds / 1e9


def multiply_registers(dtype: torch.dtype, rounds: int) -> int:
    """Multiply and add values in registers, with all threads. Returns the number of operations. int8 uses VNNI, or
    float32 on a machine without it."""
    return int(function("vllm_lite_multiply", (int32, int64), int64)(DTYPES[dtype], rounds))


def peak_tflop_s(num_threads: int, dtype: torch.dtype, rounds: int = 100_000) -> float:
    """TFLOP/s at which `num_threads` of our threads multiply and add in registers."""
    cpu.set_num_threads(num_threads)
    (seconds,) = best_times(clock_for(num_threads), [lambda: multiply_registers(dtype, rounds)], 0, min_rounds=8)
    return multiply_registers(dtype, rounds) / seconds / 1e12
