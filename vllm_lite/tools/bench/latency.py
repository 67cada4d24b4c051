"""`vllm-lite bench latency`: the time of one batch from its prompts to its last tokens, through all processes."""

import random
import statistics
import time
from typing import Any

from tqdm import tqdm

from vllm_lite.client.engines.launch import resolve
from vllm_lite.client.llm import LLM
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.tools.bench.serve_result import percentile

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(
    model: str,
    batch: tuple[int, int, int],  # prompts, and prompt and generated tokens of each
    num_iters: tuple[int, int],  # warm-up batches, and measured ones
    settings: dict[str, Any],  # fields of EngineConfig
    *,
    sampling: dict[str, Any] | None = None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Measure the seconds of each batch, under vLLM's keys. Prompts are random; prefixes are not cached. `sampling` are
    fields of SamplingParams. Raises ConfigError for lengths that do not fit the model."""
    given = {"enable_prefix_caching": False, "log_level": "warning", **settings}
    batch_size, *lengths = batch
    limit = resolve(EngineConfig.load({"model": model, **given})).max_model_len
    if limit is not None and sum(lengths) > limit:
        raise ConfigError(f"--input-len and --output-len are {sum(lengths)} together; the model has {limit}")
    with LLM(model, **given) as llm:
        rng = random.Random(0)
        params = SamplingParams(**{**(sampling or {}), "max_tokens": lengths[1], "ignore_eos": True})
        latencies = []
        for place in tqdm(range(sum(num_iters)), desc="batches", disable=None if show_progress else True):
            prompts = [[rng.randrange(5, llm.engine.vocab_size) for _ in range(lengths[0])] for _ in range(batch_size)]
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if place >= num_iters[0]:
                latencies.append(time.perf_counter() - start_s)
    ordered = sorted(latencies)
    return {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(wanted): percentile(ordered, wanted) for wanted in PERCENTILES},
    }


def table(figures: dict[str, Any]) -> str:
    lines = [f"{'average latency':<18}{figures['avg_latency']:>10.4f} s"]
    lines += [f"{f'{name}th percentile':<18}{value:>10.4f} s" for name, value in figures["percentiles"].items()]
    return "\n".join(lines)
