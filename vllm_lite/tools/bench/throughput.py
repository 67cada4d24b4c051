"""`vllm-lite bench throughput`: the same requests one at a time and concurrently, through all processes. With
transformers or adapters, measurements alternate, so that other load on the machine affects both."""

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_lite.client.llm import LLM
from vllm_lite.client.lora import LoRARequest
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime.machine import num_physical_cores
from vllm_lite.tools.bench.models import RANDOM_MODELS, write_config

ALONE = 4
"""Number of requests measured one at a time."""


class _Ours:
    def __init__(self, stack: ExitStack, folder: str, lengths: tuple[int, int], settings: dict[str, Any]) -> None:
        self.llm = stack.enter_context(LLM(folder, **settings))
        self.input_len, output_len = lengths
        self.rng = random.Random(0)
        self.params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)

    def seconds(self, num_prompts: int, adapters: Sequence[LoRARequest | None] = (None,)) -> float:
        """Measure a batch of prompts of random ids, without a common prefix; `adapters` are used round-robin."""
        vocab_size = self.llm.engine.vocab_size
        prompts = [[self.rng.randrange(5, vocab_size) for _ in range(self.input_len)] for _ in range(num_prompts)]
        in_turn = [adapters[number % len(adapters)] for number in range(num_prompts)]
        start_s = time.perf_counter()
        self.llm.generate(prompts, self.params, use_tqdm=False, lora_request=in_turn)
        return time.perf_counter() - start_s


class _Adapted:
    """The same engine, with random adapters used round-robin by the requests."""

    def __init__(self, stack: ExitStack, ours: _Ours, count: int) -> None:
        from vllm_lite.tools.bench.models import write_adapters

        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="vl-"))
        config = ours.llm.config
        paths = write_adapters(config.model, Path(made), count, config.max_lora_rank)
        self.ours, self.adapters = ours, [LoRARequest(path.name, 1, path) for path in paths]

    def seconds(self, num_prompts: int) -> float:
        return self.ours.seconds(num_prompts, self.adapters)


class _Transformers:
    def __init__(self, stack: ExitStack, folder: str, lengths: tuple[int, int], settings: dict[str, Any]) -> None:
        threads = settings.get("cpu_threads") or num_physical_cores()
        arguments = [folder, str(settings.get("dtype", "auto")), str(threads), *map(str, lengths)]
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "vllm_lite.tools.bench.transformers_generate", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._answer()

    def seconds(self, num_prompts: int) -> float:
        if self.process.stdin is None:
            raise RuntimeError("the process has no input")
        self.process.stdin.write(f"{num_prompts}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise ConfigError("transformers could not run this model; its message is above")
        return line


def run(
    model: str,
    sizes: tuple[int, int, int],  # prompts, and prompt and output tokens of each
    settings: dict[str, Any],  # fields of EngineConfig
    *,
    compare: bool = False,
    num_adapters: int = 0,
    repeats: int = 3,
) -> dict[str, Any]:
    """Medians of output tokens per second, one at a time and concurrently; with `compare`, also those of transformers;
    with `num_adapters`, also those of requests with that many LoRA adapters."""
    num_prompts, lengths = sizes[0], sizes[1:]
    if num_adapters:
        settings = {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": 16, **settings}
    with ExitStack() as stack:
        folder = model
        if model in RANDOM_MODELS:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vl-"))
            write_config(model, folder)
            settings = settings | {"load_format": "dummy"}
        ours = _Ours(stack, folder, lengths, settings)
        engines: dict[str, _Ours | _Adapted | _Transformers] = {"ours": ours}
        if num_adapters:
            engines["adapted"] = _Adapted(stack, ours, num_adapters)
        if compare:
            engines["transformers"] = _Transformers(stack, folder, lengths, settings)
        alone: dict[str, list[float]] = {name: [] for name in engines}
        together: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.seconds(max(2, num_adapters))
        for _ in range(repeats):
            for name, engine in engines.items():
                alone[name].append(sum(engine.seconds(1) for _ in range(ALONE)) / ALONE)
                together[name].append(engine.seconds(num_prompts))
    figures: dict[str, Any] = {
        "model": model,
        "num_prompts": num_prompts,
        "input_len": lengths[0],
        "output_len": lengths[1],
        "settings": settings,
    }
    for name in engines:
        alone_s, together_s = statistics.median(alone[name]), statistics.median(together[name])
        prefix = "" if name == "ours" else f"{name}_"
        figures[f"{prefix}alone_tok_s"] = round(lengths[1] / alone_s, 1)
        figures[f"{prefix}together_tok_s"] = round(num_prompts * lengths[1] / together_s, 1)
    figures["ratio"] = round(figures["together_tok_s"] / figures["alone_tok_s"], 2)
    if num_adapters:
        ratios = sorted(plain / adapted for plain, adapted in zip(together["ours"], together["adapted"], strict=True))
        figures |= {"num_adapters": num_adapters, "adapted_ratios": [round(ratio, 3) for ratio in ratios]}
    return figures


def as_vllm(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of concurrent requests under the names of vLLM's benchmark, which counts prompt tokens, too."""
    num_prompts = figures["num_prompts"]
    output_tok_s = figures["together_tok_s"]
    elapsed_s = num_prompts * figures["output_len"] / output_tok_s
    num_tokens = num_prompts * (figures["input_len"] + figures["output_len"])
    return {
        "elapsed_time": elapsed_s,
        "num_requests": num_prompts,
        "total_num_tokens": num_tokens,
        "requests_per_second": num_prompts / elapsed_s,
        "tokens_per_second": num_tokens / elapsed_s,
    }


def table(figures: dict[str, Any]) -> str:
    sizes = f"{figures['num_prompts']} prompts of {figures['input_len']} tokens, {figures['output_len']} out"
    lines = [f"{figures['model']}: {sizes}, output tokens/s", f"{'':<14}{'one at a time':>14}{'all at once':>14}"]
    for name, prefix in (("vllm_lite", ""), ("with adapters", "adapted_"), ("transformers", "transformers_")):
        if f"{prefix}alone_tok_s" in figures:
            alone, together = figures[f"{prefix}alone_tok_s"], figures[f"{prefix}together_tok_s"]
            lines.append(f"{name:<14}{alone:>14.1f}{together:>14.1f}")
    if ratios := figures.get("adapted_ratios"):
        median, low, high = statistics.median(ratios), ratios[0], ratios[-1]
        what = f"{figures['num_adapters']} adapters against none, all at once, {len(ratios)} pairs in turn"
        lines.append(f"{what}: {median:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)
