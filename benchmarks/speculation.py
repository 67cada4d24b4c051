"""Output tokens per second with each way to draft, and without: the same tokens, timed in turn.

    python benchmarks/speculation.py MODEL                 # a first answer, and the same one again
    python benchmarks/speculation.py MODEL --streams 8
    python benchmarks/speculation.py MODEL --ways none self draft_model --draft-model OTHER

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
    "chat": "I have two free days in Lisbon. What should I see, and where should I eat?",
    "edit": "Repeat this text, with every 'we' replaced by 'they': When the storm came we closed the shutters, we lit "
    "the lamp and we waited. In the morning we went down to the beach, where we found a bottle, and in it a letter "
    "that we could not read. So we carried it home, and there we dried it by the stove until we saw words.",
    "code": "Write a Python class for a stack with push, pop, peek, size and a test for each of these methods.",
}
WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "self": {"method": "self", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
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
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "draft_model"], default=["none", "ngram", "suffix"])
    parser.add_argument("--draft-model", help="of the way draft_model")
    arguments = parser.parse_args()
    by_model = {"draft_model": {"model": arguments.draft_model, "num_speculative_tokens": 4}}
    ways = {way: (WAYS | by_model)[way] for way in arguments.ways}
    speeds: dict[tuple[str, str, str], list[float]] = {}
    expected: dict[str, list[list[int]]] = {}
    for _ in range(arguments.rounds):
        for way, config in ways.items():
            with LLM(arguments.model, max_model_len=4096, speculative_config=config) as llm:
                ask(llm, "Hello.", arguments.streams, 40)
                for name, question in QUESTIONS.items():
                    for which in MEASURED:
                        speed, tokens = ask(llm, question, arguments.streams, arguments.tokens)
                        speeds.setdefault((name, which, way), []).append(speed)
                        if expected.setdefault(name, tokens) != tokens:
                            raise SystemExit(f"{name}: other tokens with {way}")
    print(f"{'question':10}{'answer':8}" + "".join(f"{way:>10}" for way in ways))
    for name in QUESTIONS:
        for which in MEASURED:
            print(f"{name:10}{which:8}" + "".join(f"{median(speeds[name, which, way]):10.0f}" for way in ways))


if __name__ == "__main__":
    main()
