"""Shared by parts of `gpu_check`: paged caches with random contents, graphs, and timing on both kinds of device."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MANY = 20
"""Number of launches that are measured together if one takes the device less time than the host."""
Launch = Callable[[int], Any]
"""One launch; the argument selects one of several equal problems."""


@dataclass(frozen=True)
class Shape:
    """A decode step over a paged cache."""

    batch: int
    context: int
    group: int
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    layout: str = "HND"
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one step reads."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize

    def __str__(self) -> str:
        name = f"batch {self.batch} ctx {self.context} gqa {self.group} {self.layout}"
        return name if self.kv_dtype.itemsize > 1 else f"{name} fp8"


@dataclass(frozen=True)
class Paged:
    """Tensors of a Shape, with `len(tables)` sets of blocks, more than the caches of the device hold."""

    shape: Shape
    kv: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size]
    tables: list[torch.Tensor]  # each int32 [batch, blocks of a context]
    seq_lens: torch.Tensor  # int32 [batch]
    query: torch.Tensor  # [batch, num_heads, head_size]
    out: torch.Tensor  # like query


def paged(shape: Shape, device: torch.device, at_least_bytes: int, seed: int = 0) -> Paged:
    """Make the tensors of a Shape: blocks in random order, in as many sets as make up `at_least_bytes`."""
    generator = torch.Generator().manual_seed(seed)
    num_sets = max(1, min(64, -(-at_least_bytes // shape.kv_bytes)))
    width = -(-shape.context // shape.block_size)
    num_blocks = num_sets * shape.batch * width + 1
    inner = (shape.num_kv_heads, shape.block_size, shape.head_size)
    if shape.layout == "NHD":
        inner = (shape.block_size, shape.num_kv_heads, shape.head_size)
    kv = torch.empty(num_blocks, 2, *inner, dtype=torch.bfloat16, device=device).normal_().to(shape.kv_dtype)
    if shape.layout == "NHD":
        kv = kv.transpose(2, 3)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).to(torch.int32).to(device)
    tables = [part.reshape(shape.batch, width) for part in order.split(shape.batch * width)]
    query = torch.randn(shape.batch, shape.num_heads, shape.head_size, dtype=torch.bfloat16, device=device)
    seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    return Paged(shape, kv, tables, seq_lens, query, torch.zeros_like(query))


class DeviceTimer:
    """Measures the median seconds of a launch on a GPU. Many launches are captured in a graph, so that the host's time
    does not count."""

    def __init__(self, repeats: int = 15) -> None:
        self.repeats = repeats

    def seconds(self, launch: Launch, num_sets: int = 1) -> float:
        count = max(num_sets, 4)
        graph = capture(lambda: [launch(i % num_sets) for i in range(count)])
        times = []
        for _ in range(self.repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / count)
        return float(statistics.median(times[2:]))

    def eager_seconds(self, launch: Launch, count: int = 1) -> float:
        """The same for launches that cannot be captured: `count` of them between two events. They must take the device
        longer than the host."""
        times = []
        for i in range(self.repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                launch(i)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / count)
        return float(statistics.median(times[2:]))

    def device_seconds(self, launch: Launch) -> float:
        """Measure the device's time of a launch that takes the host longer than the device: with torch's profiler, or,
        if that reports nothing, with many launches between two events."""
        launch(0)
        torch.cuda.synchronize()
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for i in range(MANY):
                    launch(i)
                torch.cuda.synchronize()
            total_us = sum(event.self_device_time_total for event in seen.key_averages())
        except (RuntimeError, AttributeError):
            total_us = 0
        return total_us / MANY / 1e6 if total_us > 0 else self.eager_seconds(launch, MANY)


class HostTimer(DeviceTimer):
    """Replaces DeviceTimer in tests of the script without a GPU."""

    def seconds(self, launch: Launch, num_sets: int = 1) -> float:  # noqa: ARG002
        return self.eager_seconds(launch)

    def eager_seconds(self, launch: Launch, count: int = 1) -> float:  # noqa: ARG002
        start_s = time.perf_counter()
        launch(0)
        return time.perf_counter() - start_s

    device_seconds = eager_seconds


def timer_for(device: torch.device) -> DeviceTimer:
    return DeviceTimer() if device.type == "cuda" else HostTimer()


def capture(run: Callable[[], Any]) -> Callable[[], None]:
    """Record what `run` does in a CUDA graph; calling the result replays it. Without a GPU `run` itself is called."""
    if not torch.cuda.is_available():
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles and loads kernels, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay
