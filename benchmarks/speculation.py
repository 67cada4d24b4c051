"""Output tokens per second with each way to draft, and without: the same tokens, timed in turn.

    python benchmarks/speculation.py MODEL                 # a first answer, and the same one again
    python benchmarks/speculation.py MODEL --streams 8

Every round asks each engine anew; "again" is the same question once more, whose first answer drafts by suffix know.
Between the two the prefix cache is forgotten, so that no prompt is cheaper. Fails if the tokens differ.
"""

import argparse
import time
from statistics import median
from typing import Any

from vllm_lite import LLM, SamplingParams

QUESTIONS = {
    "prose": "Write a long story about a lighthouse keeper who finds a bottle with a letter.",
    "json": "List ten European capitals as JSON objects with the keys name, country and population.",
    "code": "Write a Python class for a stack with push, pop, peek, size and a test for each of these methods.",
}
WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}
MEASURED = ("first", "again")


def ask(llm: LLM, question: str, streams: int, num_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of `streams` equal chats, and their tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": question}]] * streams, params, use_tqdm=False)
    took_s = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, tokens)) / took_s, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    speeds: dict[tuple[str, str, str], list[float]] = {}
    expected: dict[str, list[list[int]]] = {}
    for _ in range(arguments.rounds):
        for way, config in WAYS.items():
            with LLM(arguments.model, max_model_len=4096, speculative_config=config) as llm:
                ask(llm, "Hello.", arguments.streams, 40)
                for name, question in QUESTIONS.items():
                    for which in MEASURED:
                        speed, tokens = ask(llm, question, arguments.streams, arguments.tokens)
                        speeds.setdefault((name, which, way), []).append(speed)
                        if expected.setdefault(name, tokens) != tokens:
                            raise SystemExit(f"{name}: other tokens with {way}")
    print(f"{'question':10}{'answer':8}" + "".join(f"{way:>10}" for way in WAYS))
    for name in QUESTIONS:
        for which in MEASURED:
            print(f"{name:10}{which:8}" + "".join(f"{median(speeds[name, which, way]):10.0f}" for way in WAYS))


if __name__ == "__main__":
    main()
