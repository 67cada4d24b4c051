"""Cost of grammars on all rows of a batch: W2 of peers.py with and without grammars, in turn, in one engine.

    python benchmarks/structured_cost.py --size small --rounds 5

32 requests of 16 to 512 prompt tokens, 64 output tokens each, on the random models of benchmarks/runners with their
vocabulary of 32,000. The grammars differ from row to row, and none can end before its 64 tokens. Jump-forward, which
saves steps, is off for the cost of masks; a second measurement has it on.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runners import make_model
from runners.make_workload import LENGTHS

from vllm_lite import LLM, SamplingParams
from vllm_lite.protocol.structured import StructuredOutputsParams

NUM_TOKENS = 64
ENTRIES = 200
"""Minimum entries of each list, so that no output ends early."""
FIELDS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "minLength": 5},
    "count": {"type": "integer"},
    "kind": {"enum": ["small", "large", "none"]},
    "ratio": {"type": "number"},
    "at": {"type": "string", "format": "date"},
}


def schema_of(place: int) -> dict[str, Any]:
    """A list of objects; each place has fields of its own."""
    chosen = list(FIELDS)[place % len(FIELDS) :] or list(FIELDS)
    properties = {f"{name}_{place}": FIELDS[name] for name in chosen}
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": ENTRIES}


def prompts_of(round_number: int) -> list[list[int]]:
    rng = random.Random(round_number)
    return [[rng.randrange(3, make_model.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def params(constrained: bool) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "detokenize": False, "ignore_eos": True, "temperature": 1.0}
    schemas = [schema_of(place) if constrained else None for place in range(len(LENGTHS))]
    forms = [None if schema is None else StructuredOutputsParams(json=schema) for schema in schemas]
    return [SamplingParams(**common, structured_outputs=form, seed=place) for place, form in enumerate(forms)]


def seconds(llm: LLM, round_number: int, wanted: Sequence[SamplingParams]) -> tuple[float, int]:
    """Seconds and steps of one batch. Raises RuntimeError if an output has the wrong length."""
    before, started_s = llm.stats().steps, time.perf_counter()
    outputs = llm.generate(prompts_of(round_number), list(wanted), use_tqdm=False)
    took_s = time.perf_counter() - started_s
    if any(len(output.outputs[0].token_ids) != NUM_TOKENS for output in outputs):
        raise RuntimeError("an output ended early")
    return took_s, llm.stats().steps - before


def measure(folder: Path, rounds: int, **settings: Any) -> None:
    ways = {"free": params(False), "constrained": params(True)}
    took: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, int] = {}
    with LLM(folder, enable_prefix_caching=False, log_level="error", **settings) as llm:
        for name, wanted in ways.items():
            seconds(llm, 0, wanted)  # warms up, and compiles the grammars
            steps[name] = 0
        for round_number in range(1, rounds + 1):
            for name in sorted(ways, reverse=bool(round_number % 2)):
                spent_s, done = seconds(llm, round_number, ways[name])
                took[name].append(spent_s)
                steps[name] += done
    each = {name: 1e3 * sum(took[name]) / steps[name] for name in ways}
    ratios = [one / other for one, other in zip(took["constrained"], took["free"], strict=True)]
    print(f"{settings}")
    for name in ways:
        batch_s = statistics.median(took[name])
        print(f"  {name:12} {batch_s:7.3f} s a batch, {each[name]:7.3f} ms a step, {steps[name]} steps")
    print(f"  constrained / free: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(make_model.SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model.main(args.size, folder)
        measure(folder, args.rounds, jump_forward=False)
        measure(folder, args.rounds)


if __name__ == "__main__":
    main()
