"""`python benchmarks step`: the time of each part of one decode step, in the worker, the engine and the client.

The processes are the product's own. A ledger (ledger.py) measures the parts of each, and recorded programs measure
their kernels. All figures are means over steps in which all streams decode.
"""

import os
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from micro import child_path
from micro.kernels_timing import read_bandwidth_gb_s
from micro.ledger import CPU, FOLDER, REST, WHOLE, Step, load
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.headers import Tensor, read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, active_bytes, weights_bytes
from vllm_lite.client.engines.launch import resolve
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.models.registry import Sizes, build
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.api import Finished, Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime import supervise
from vllm_lite.runtime.kv_dtypes import KV_DTYPE_BYTES, KV_SCALE_BYTES
from vllm_lite.runtime.machine import num_physical_cores

PATIENCE_S = 120.0
LARGEST_READ = 1 << 30


def run(model: str, num_streams: int, context: int, num_steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Decode `num_steps` tokens of each of `num_streams` prompts. Halfway through, the context of each has `context`
    tokens.

    `settings` are fields of EngineConfig. Raises ConfigError for numbers that do not fit the model.
    """
    if num_streams < 1 or num_steps < 4 or context <= num_steps // 2:
        raise ConfigError(
            "there must be at least 1 stream and 4 steps, and the context must be longer than half of the steps; got "
            f"{num_streams} streams, {num_steps} steps and a context of {context} tokens"
        )
    given = settings | {"model": model, "max_num_seqs": num_streams, "log_level": "error"}
    config = resolve(EngineConfig.check(given | {"enable_prefix_caching": False}))
    spec = load_spec(config.model, config.model_impl, config.pooling)
    threads = (config.cpu_threads or 0) * config.tensor_parallel_size or num_physical_cores()  # of all workers
    worker, engine, client = _decode(config, spec, num_streams, context - num_steps // 2, num_steps)
    parts = _mean(worker, num_streams)
    kernels = {
        name.removeprefix("call "): {"calls": parts.pop(f"calls {name.removeprefix('call ')}"), "us": parts.pop(name)}
        for name in [name for name in parts if name.startswith("call ")]
    }
    step_us = parts[WHOLE]
    checkpoint = Checkpoint(spec, tensors(config, spec))
    num_bytes = step_bytes(config, checkpoint, num_streams, context)
    gb_s = read_bandwidth_gb_s(threads, min(_bytes_of_many_steps(config, checkpoint, num_bytes), LARGEST_READ))
    bound_us = num_bytes / gb_s / 1e3
    return {
        "model": model,
        "streams": num_streams,
        "context": context,
        "threads": threads,
        "step_us": step_us,
        "tokens_per_s": num_streams / step_us * 1e6,
        "worker": parts,
        "kernels": kernels,
        "engine": _mean(engine, num_streams),
        "client": client,
        "bound": {"bytes": num_bytes, "gb_s": gb_s, "us": bound_us, "share": bound_us / step_us},
    }


def tensors(config: ResolvedConfig, spec: ModelSpec) -> Mapping[str, Tensor]:
    """Return the tensors of the checkpoint, or, if weights are random, those that the model would load."""
    if config.load_format != "dummy":
        return read_headers(Path(config.model))
    model = build(spec, getattr(torch, config.dtype), "cpu", Sizes(1, 1))
    slots = [slot for group in model.weight_groups() for part in group.stacks for slot in part.slots]
    return {slot.name: Tensor("BF16", slot.stored_shape) for slot in slots}


def _bytes_of_many_steps(config: ResolvedConfig, checkpoint: Checkpoint, num_bytes: int) -> int:
    """Return the bytes that steps read until they read the same ones again. With experts, which change from step to
    step, these are all weights; else those of one step."""
    if checkpoint.spec.experts is None:
        return num_bytes
    return weights_bytes(checkpoint, KV_DTYPE_BYTES[config.dtype], config.quantization)


def step_bytes(config: ResolvedConfig, checkpoint: Checkpoint, num_streams: int, context: int) -> int:
    """Bytes that a decode step has to read, as they are stored in memory: KV of the contexts, states of recurrent
    layers, and weights. Of the embedding only the rows of the tokens count, and of the experts as many as the sequences
    are likely to choose."""
    weights = active_bytes(checkpoint, KV_DTYPE_BYTES[config.dtype], config.quantization, num_tokens=num_streams)
    element_bytes = KV_DTYPE_BYTES[config.kv_cache_dtype]
    scale = KV_SCALE_BYTES.get(config.kv_cache_dtype, 0) // element_bytes
    groups = checkpoint.spec.kv_groups
    kv = sum(prod(group.kv_shape(1, scale)) * min(context, group.window or context) for group in groups)
    return weights + num_streams * (kv * element_bytes + checkpoint.spec.state_bytes())


def _decode(
    config: ResolvedConfig, spec: ModelSpec, num_streams: int, prompt_len: int, num_steps: int
) -> tuple[list[Step], list[Step], dict[str, float]]:
    """Return the steps of the worker and of the engine, and the client's figures for one step."""
    with (
        tempfile.TemporaryDirectory(prefix="vl-") as folder,
        patch.dict(os.environ, child_path() | {FOLDER: folder, "GOMP_SPINCOUNT": "0"}),
    ):
        run_dir = tempfile.mkdtemp(prefix="vl-")
        address = f"ipc://{run_dir}/engine"
        engine = EngineSettings(config, address, run_dir, "micro.step_worker")
        child = supervise.spawn("micro.step_engine", engine, "engine", lambda _reason: None)
        try:
            with closing(Session.connect(address, timeout_s=config.ready_timeout_s, alive=child.exited)) as session:
                prompts = _prompts(num_streams, prompt_len, spec.vocab_size)
                client = [_generate(session, prompts, num_steps) for _ in range(2)][-1]
        finally:
            child.stop(PATIENCE_S)
            supervise.remove_dir(run_dir)
        return load(folder, "worker"), load(folder, "engine"), client


def _prompts(count: int, length: int, vocab_size: int) -> list[bytes]:
    rng = random.Random(0)
    return [pack_tokens([rng.randrange(vocab_size) for _ in range(length)]) for _ in range(count)]


def _generate(session: Session, prompts: list[bytes], num_steps: int) -> dict[str, float]:
    """Generate `num_steps` tokens for each prompt. Returns CPU time, messages and wall time of this process per step;
    times are in microseconds."""
    inbox: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=num_steps, temperature=0.0, ignore_eos=True, detokenize=False)
    cpu_ns, start_ns, left, num_messages = time.process_time_ns(), time.perf_counter_ns(), len(prompts), 0
    for index, prompt in enumerate(prompts):
        session.submit(Generate(f"{start_ns}-{index}", prompt, params), inbox.put)
    while left:
        for event in inbox.get(timeout=PATIENCE_S):
            if isinstance(event, StreamFailure) or (isinstance(event, Finished) and event.error):
                raise EngineError(f"a request failed: {event}")
            left -= isinstance(event, Finished)
        num_messages += 1
    return {
        CPU: (time.process_time_ns() - cpu_ns) / num_steps / 1e3,
        "messages": num_messages / num_steps,
        "wall": (time.perf_counter_ns() - start_ns) / num_steps / 1e3,
    }


def _mean(steps: list[Step], num_streams: int) -> dict[str, float]:
    """Compute the mean microseconds of each part of a step, and the mean numbers of calls. The means are over the later
    half of the steps in which all streams decoded, without steps that took more than three times the median."""
    full = [step for step in steps if step["streams"] == num_streams]
    full = full[len(full) // 2 + 1 : -2]
    if not full:
        raise EngineError("the streams never decoded all together; let them decode more tokens")
    usual = statistics.median(step[WHOLE] / step["steps"] for step in full)
    full = [step for step in full if step[WHOLE] <= 3 * usual * step["steps"]]
    names = sorted(
        {name for step in full for name in step} - {"streams", "steps"}, key=lambda name: (name == REST, name)
    )
    num_steps = sum(step["steps"] for step in full)
    scale = {name: 1 if name.startswith("calls ") else 1000 for name in names}
    return {name: sum(step.get(name, 0) for step in full) / num_steps / scale[name] for name in names}


def table(figures: dict[str, Any]) -> str:
    """Format the figures: a line for each part, with its share of the step."""
    step_us, bound = figures["step_us"], figures["bound"]
    what = f"streams: {figures['streams']}, context: {figures['context']}, threads: {figures['threads']}"
    lines = [f"{figures['model']}, {what}: {step_us:.0f} us a step, {figures['tokens_per_s']:.0f} tokens/s"]

    def line(name: str, value_us: float, remark: str = "") -> None:
        lines.append(f"  {name:<28}{value_us:>10.1f} us {100 * value_us / step_us:>6.1f} %  {remark}".rstrip())

    for process in ("worker", "engine"):
        lines.append(f"{process}, one thread")
        for name, value_us in figures[process].items():
            if name not in (WHOLE, CPU):
                line(name, value_us)
            if name == "program":
                for kernel, cost in sorted(figures["kernels"].items(), key=lambda item: -item[1]["us"]):
                    line(f"  {kernel}", cost["us"], f"{cost['calls']:.0f} calls")
    lines.append("CPU time of all threads")
    for process in ("worker", "engine", "client"):
        line(process, figures[process][CPU])
    lines.append(
        f"bound: {bound['bytes'] / 1e6:.1f} MB, read at {bound['gb_s']:.1f} GB/s in this run: {bound['us']:.0f} us, "
        f"{100 * bound['share']:.0f} % of the step"
    )
    return "\n".join(lines)
