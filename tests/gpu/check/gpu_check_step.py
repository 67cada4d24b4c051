"""Part of `gpu_check`: steps of a worker alone, with random weights: gpu_check_step.py 1b|8b|tiny [--emulate]

Wall time is the time that a caller of the worker waits; the device's time is the sum over its kernels, by torch's
profiler. A better loop could save the difference. At the end, the memory that the profile predicted is compared with
the memory in use.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_check_cases import usable
from gpu_check_models import MODELS, RandomWorker, emulated_device
from gpu_check_parts import emit, parser_of, run_checks

from vllm_lite.config import GIB
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Entry, Finish, NewRequest

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
RANDOM = Sampling(0.8, 50, 0.9, 0.0, 1)
TOP_KERNELS = 10
AHEAD_STEPS = 32
MOST_STEPS = 150
"""More steps than any measurement runs with the same sequences."""


class Steps:
    """Measures several kinds of steps in turn, each with new sequences."""

    def __init__(self, model: str, worker: RandomWorker) -> None:
        self.model = model
        self.worker = worker
        self.small = worker.worker.device.torch.type == "cpu"
        self.repeats = 2 if self.small else 30
        self.handle = 0
        pool = worker.worker.runner.cache_engine.pool
        for part in pool.split(max(1, len(pool) // 16)):
            part.normal_()
        pool[0] = 0  # the null block

    def request(self, num_computed: int, num_tokens: int, first_block: int, sampling: Sampling = GREEDY) -> NewRequest:
        """A new sequence that claims to have `num_computed` tokens in the cache."""
        self.handle += 1
        length = num_computed + num_tokens
        tokens = pack_tokens(np.random.default_rng(self.handle).integers(3, 500, length).tolist())
        blocks = [list(range(first_block, first_block + self.num_blocks(length)))]
        fields: dict[str, Any] = {"num_computed": num_computed, "num_cached": num_computed, "num_tokens": num_tokens}
        return NewRequest(self.handle, tokens, length, block_ids=blocks, sampling=sampling, **fields)

    def num_blocks(self, length: int) -> int:
        return -(-(length + MOST_STEPS) // self.worker.config.block_size)

    @contextmanager
    def decoding(self, batch: int, context: int, sampling: Sampling = GREEDY) -> Iterator[list[Entry]]:
        """The entries of a step in which `batch` sequences decode; none if the cache has no room for them."""
        width = self.num_blocks(context)
        if batch * width >= self.worker.ready.num_blocks:
            emit(say=f"batch {batch} ctx {context}: no room in {self.worker.ready.num_blocks} blocks")
            yield []
            return
        requests = [self.request(context - 1, 1, 1 + width * row, sampling) for row in range(batch)]
        self.worker.run(requests)
        try:
            yield [Continue(request.handle, 1, []) for request in requests]
        finally:
            self.worker.run([Finish(request.handle) for request in requests])

    def decode(self, batch: int, context: int) -> None:
        """Decode steps, replayed, launched one by one, and sampled at random."""
        runner = self.worker.worker.runner
        for way, sampling in (("graphs", GREEDY), ("eager", GREEDY), ("random", RANDOM)):
            kept = runner.forward
            with self.decoding(batch, context, sampling) as entries:
                if not entries:
                    return
                runner.forward = runner.eager if way == "eager" else kept
                try:
                    self.row(f"step, {way}", f"{self.model} {batch} x {context}", lambda: entries, batch * context)
                finally:
                    runner.forward = kept

    def ahead(self, batch: int, context: int) -> None:
        """Decode steps as in a server: several are sent together, and each is launched before the previous one's tokens
        are on the host."""
        with self.decoding(batch, context) as entries:
            if not entries:
                return
            count = 2 if self.small else AHEAD_STEPS
            self.worker.run_together([entries] * 2)
            start_s = time.perf_counter()
            self.worker.run_together([entries] * count)
            us = (time.perf_counter() - start_s) / count * 1e6
            values: dict[str, Any] = {"kernel": "step, ahead", "shape": f"{self.model} {batch} x {context}"}
            values["us"] = round(us, 1)
            if device := self.device_time(lambda: entries):
                values |= {"device_us": device["device_us"], "share": round(device["device_us"] / us, 3)}
            emit(row=values)

    def mixed(self, decodes: int, context: int, chunk: int) -> None:
        """Decodes beside the first chunk of a prompt, each time of a new one."""
        last: list[int] = []

        def entries() -> list[Entry]:
            chunked = self.request(0, chunk, 1 + self.num_blocks(context) * decodes)
            finished: list[Entry] = [Finish(handle) for handle in last]
            last[:] = [chunked.handle]
            return [*finished, *going, chunked]

        if decodes == 0:
            going: list[Entry] = []
            self.row("step, prompt", f"{self.model} {chunk}", entries, chunk)
        else:
            with self.decoding(decodes, context) as going:
                if going:
                    self.row("step, mixed", f"{self.model} {decodes} x {context} + {chunk}", entries, decodes * context)
        self.worker.run([Finish(handle) for handle in last])

    def row(self, kernel: str, shape: str, entries: Callable[[], Sequence[Entry]], cached: int) -> None:
        times = []
        for _ in range(self.repeats):
            step = entries()
            start_s = time.perf_counter()
            self.worker.run(step)
            times.append(time.perf_counter() - start_s)
        values: dict[str, Any] = {"kernel": kernel, "shape": shape}
        values["us"] = round(1e6 * statistics.median(times[len(times) // 5 :]), 1)
        if device := self.device_time(entries):
            values |= device
            values["share"] = round(device["device_us"] / values["us"], 3)
            profile, ready = self.worker.profile, self.worker.ready
            if profile is not None and device["device_us"]:
                num_bytes = profile.weights_bytes + cached * ready.block_bytes / self.worker.config.block_size
                values["gb_s"] = round(num_bytes / device["device_us"] / 1e3, 1)
        emit(row=values)

    def device_time(self, entries: Callable[[], Sequence[Entry]]) -> dict[str, Any]:
        """Measure the device's work in a step: microseconds, launches, and the kernels that take most of the time."""
        from torch.profiler import ProfilerActivity, profile

        count = 1 if self.small else 8
        try:
            with profile(activities=[ProfilerActivity.CPU if self.small else ProfilerActivity.CUDA]) as seen:
                for _ in range(count):
                    self.worker.run(entries())
                if not self.small:
                    torch.cuda.synchronize()
            found = [(event.self_device_time_total, event.count, event.key) for event in seen.key_averages()]
        except (RuntimeError, AttributeError) as error:
            emit(say=f"no profile: {error}")
            return {}
        top = [[round(us / count, 1), calls / count, key[:60]] for us, calls, key in sorted(found, reverse=True)]
        launches = round(sum(calls for _, calls, _ in found) / count, 1)
        device_us = round(sum(us for us, _, _ in found) / count, 1)
        return {"device_us": device_us, "launches": launches, "top": top[:TOP_KERNELS]}

    def memory(self) -> None:
        """Run the largest step while cache and graphs are allocated, and report the memory in use beside the allowed
        memory."""
        worker, profile = self.worker.worker, self.worker.profile
        device_memory = worker.device.memory
        if profile is None or device_memory is None:
            return
        allowed = profile.total_bytes * profile.utilization
        chunk = min(worker.limits.max_num_tokens, worker.limits.max_model_len - MOST_STEPS)
        if self.num_blocks(chunk) < self.worker.ready.num_blocks:
            largest = self.request(0, chunk, 1)
            self.worker.run([largest])
            self.worker.run([Finish(largest.handle)])
        used = profile.total_bytes - device_memory.free_bytes()
        figures = {
            "allowed": allowed,
            "used": used,
            "weights": profile.weights_bytes,
            "activations": profile.activations_bytes,
            "graphs, predicted": profile.graph_bytes,
            "graphs": self.worker.graph_bytes,
            "kv cache": self.worker.ready.num_blocks * self.worker.ready.block_bytes,
        }
        fact = {name: round(value / GIB, 3) for name, value in figures.items()}
        emit(fact={f"memory, {self.model}, GiB": fact}, say=f"memory, GiB: {fact}")
        emit(row={"kernel": "memory in use of allowed", "shape": self.model, "us": 0.0, "share": used / allowed})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    settings["cudagraph_capture_sizes"] = (1, 8, 64)
    if arguments.emulate:
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "cudagraph_capture_sizes": (1, 2)}
        settings |= {"gpu_memory_utilization": 0.7, "num_gpu_blocks_override": 64}
    start_s = time.perf_counter()
    worker = RandomWorker(arguments.model, emulated_device() if arguments.emulate else None, **settings)
    started = {f"{arguments.model} starts, s": round(time.perf_counter() - start_s, 1)}
    emit(fact=started, say=f"{worker.ready.num_blocks} blocks, {started}")
    with torch.inference_mode():
        steps = Steps(arguments.model, worker)
    gc.freeze()
    decodes = ((2, 40),) if arguments.emulate else ((1, 2048), (8, 2048), (64, 2048))
    mixed = ((1, 20, 9), (0, 0, 9)) if arguments.emulate else ((63, 2048, 2048), (0, 0, 4096))
    parts: list[tuple[Callable[..., None], tuple[int, ...]]] = [
        *((steps.decode, point) for point in decodes),
        *((steps.ahead, point) for point in decodes),
        *((steps.mixed, point) for point in mixed),
        (steps.memory, ()),
    ]
    checks = {f"{part.__name__} {point}": partial(part, *point) for part, point in parts}
    run_checks(checks, arguments.first, lambda: usable(worker.worker.device.torch))
    worker.close()


if __name__ == "__main__":
    main()
