"""The same prompts through one engine: gpu_check_engines.py ours|vllm FOLDER [--emulate]

`gpu_check` runs it once in its own Python, and once in a Python that has vLLM, if there is one. FOLDER has the
config.json of a model. Weights are random, prompts are token ids, and every output has the same length, so both engines
do the same work. It prints one line of JSON. For vLLM it imports nothing of this project.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Continues each prompt by the given number of tokens. Returns the number of all generated tokens."""
LIMITS = {"max_model_len": 4096, "gpu_memory_utilization": 0.8}


def ours(folder: str, emulate: bool) -> Generate:
    from vllm_lite import LLM, SamplingParams

    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", **LIMITS}
    if emulate:
        settings |= {"device": "cpu", "cpu_kvcache_space": 0.05, "max_model_len": 128, "single_process": True}
        del settings["gpu_memory_utilization"]
    llm = LLM(folder, **settings)

    def generate(prompts: Prompts, count: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False))

    return generate


def vllm(folder: str, emulate: bool) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, **LIMITS)

    def generate(prompts: Prompts, count: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False))

    return generate


def prompts_of(count: int, length: int, seed: int) -> Prompts:
    """Prompts of random tokens without a common prefix, so that a cache finds nothing."""
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 500) for _ in range(length)] for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["ours", "vllm"])
    parser.add_argument("folder")
    parser.add_argument("--emulate", action="store_true")
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    generate = {"ours": ours, "vllm": vllm}[arguments.engine](arguments.folder, arguments.emulate)
    found: dict[str, Any] = {"engine": arguments.engine, "start_s": round(time.perf_counter() - start_s, 1)}
    loads = ((1, 512, 128), (8, 512, 128), (256, 512, 128)) if not arguments.emulate else ((1, 9, 4), (2, 9, 4))
    generate(prompts_of(2, loads[0][1], 0), 4)
    for number, (count, length, new) in enumerate(loads, start=1):
        prompts = prompts_of(count, length, number)
        start_s = time.perf_counter()
        tokens = generate(prompts, new)
        seconds = time.perf_counter() - start_s
        found[f"{count} x {length} + {new}, tokens/s"] = round(tokens / seconds, 1)
        print(json.dumps(found), flush=True)  # a later line has all entries of the earlier ones
    return 0


if __name__ == "__main__":
    sys.exit(main())
