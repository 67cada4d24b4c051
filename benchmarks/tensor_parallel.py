"""One rank with N threads compared with N ranks of one thread each: the same requests, in turn, on one CPU machine.

    python benchmarks/tensor_parallel.py --out benchmarks/results/tensor-parallel-cpu.json

W1 is one stream of greedy decoding, W2 32 prompts of 16 to 512 tokens at once, "W2 drawn" the same with temperature 1
and top_p 0.9 (see README.md). Both engines run all the time; one is idle while the other is measured. Reported are the
median ratio of neighbouring rounds and the range of ratios.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers_report

from vllm_lite import LLM, SamplingParams
from vllm_lite.runtime.machine import num_physical_cores
from vllm_lite.tools.bench.models import RANDOM_MODELS, write_config

PROMPT_LEN, DECODED = 128, 64
LENGTHS = random.Random(0).choices(range(16, 513), k=32)
OUTPUT_LEN = 64
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "num_gpu_blocks_override": 2048,
    "enable_prefix_caching": False,
    "log_level": "error",
}

Figures = dict[str, Any]


class Engine:
    """One of the two engines."""

    def __init__(self, stack: ExitStack, folder: str, world: int, threads: int) -> None:
        self.llm = stack.enter_context(LLM(folder, tensor_parallel_size=world, cpu_threads=threads, **SETTINGS))
        self.rng = random.Random(1)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(5, self.llm.engine.vocab_size) for _ in range(length)]

    def seconds(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> float:
        params = SamplingParams(
            temperature=temperature, top_p=0.9, seed=1, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        start_s = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start_s

    def one_stream(self) -> tuple[float, float]:
        """Decoded tokens per second, and the prompt's own tokens per second."""
        prompt = [self.prompt(PROMPT_LEN)]
        first_s = self.seconds(prompt, 1, 0.0)
        return DECODED / (self.seconds(prompt, 1 + DECODED, 0.0) - first_s), PROMPT_LEN / first_s

    def many(self, temperature: float) -> float:
        """Output tokens per second of 32 requests."""
        return len(LENGTHS) * OUTPUT_LEN / self.seconds([self.prompt(n) for n in LENGTHS], OUTPUT_LEN, temperature)

    def measure(self, *, only_one_stream: bool) -> dict[str, float]:
        decode, prefill = self.one_stream()
        if only_one_stream:
            return {"W1": decode, "W1 prefill": prefill}
        return {"W1": decode, "W1 prefill": prefill, "W2": self.many(0.0), "W2 drawn": self.many(1.0)}


def run(model: str, world: int, rounds: int, *, only_one_stream: bool) -> list[Figures]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vl-"))
        write_config(model, folder)
        engines = {"one": Engine(stack, folder, 1, world), "ranks": Engine(stack, folder, world, 1)}
        for engine in engines.values():
            engine.measure(only_one_stream=only_one_stream)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for number in range(rounds):
            for name in list(engines)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(engines[name].measure(only_one_stream=only_one_stream))
            print(f"round {number + 1} of {rounds}: {found['ranks'][-1]} against {found['one'][-1]}", flush=True)
    rows = []
    for workload in found["one"][0]:
        one, ranks = ([figures[workload] for figures in found[name]] for name in ("one", "ranks"))
        ratios = sorted(several / single for several, single in zip(ranks, one, strict=True))
        rows.append(
            {
                "model": model,
                "workload": workload,
                "one_rank_tok_s": round(statistics.median(one), 1),
                "ranks_tok_s": round(statistics.median(ranks), 1),
                "ratio": round(statistics.median(ratios), 3),
                "least": round(ratios[0], 3),
                "most": round(ratios[-1], 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=RANDOM_MODELS, default="random-500m")
    parser.add_argument(
        "--world", type=int, default=num_physical_cores(), help="ranks, and threads of the other engine"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-one-stream", action="store_true", help="W1 alone: a round takes seconds, not minutes")
    parser.add_argument("--out", help="write a JSON file")
    arguments = parser.parse_args()
    rows = run(arguments.model, arguments.world, arguments.rounds, only_one_stream=arguments.only_one_stream)
    for row in rows:
        print("{workload:<12}{one_rank_tok_s:>9} {ranks_tok_s:>9}  {ratio:.3f} ({least} to {most})".format(**row))
    if arguments.out:
        head = {"device": peers_report.device(), "date": f"{datetime.now(UTC):%F}", "commit": peers_report.commit()}
        command = f"benchmarks/tensor_parallel.py --model {arguments.model} --world {arguments.world}"
        settings = {"command": command, "world": arguments.world, "rounds": arguments.rounds, "settings": SETTINGS}
        Path(arguments.out).write_text(json.dumps({**head, **settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
