"""Writes the workloads: python -m runners.make_workload FILE

{"workloads": {"W1": {"warmup": [request...], "reps": [[request...], ...]}, ...}} with request = {"id", "prompt", "n"}.
Every repeat has token ids of its own, so that a prefix cache does not carry over.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from runners.driver import Request
from runners.make_model import SPECIAL, VOCAB_SIZE

SEED = 1234
REPEATS = 8
RANDOM = random.Random(SEED)
LENGTHS = np.random.RandomState(SEED).lognormal(np.log(128), 0.6, 32).round().astype(int).clip(16, 512).tolist()


def tokens(count: int) -> list[int]:
    return [RANDOM.randrange(len(SPECIAL), VOCAB_SIZE) for _ in range(count)]


def with_prefix(prefix: list[int]) -> list[list[int]]:
    return [prefix + tokens(32) for _ in range(32)]


# What makes a repeat's prompts, tokens to generate; requests in the warm-up, tokens there.
WORKLOADS: dict[str, tuple[Callable[[], list[list[int]]], int, int, int]] = {
    "W1": (lambda: [tokens(128)], 128, 1, 8),
    "W2": (lambda: [tokens(length) for length in LENGTHS], 64, 8, 4),
    "W3": (lambda: with_prefix(tokens(512)), 32, 4, 4),
    "W4": (lambda: [tokens(2048) for _ in range(4)], 64, 1, 4),
    "W5": (lambda: [tokens(64) for _ in range(256)], 32, 8, 4),
    "W6": (lambda: [tokens(8192)], 64, 1, 4),
    "W7": (lambda: [tokens(16_384)], 64, 1, 4),
}


def requests(prompts: list[list[int]], num_tokens: int) -> list[Request]:
    return [{"id": place, "prompt": prompt, "n": num_tokens} for place, prompt in enumerate(prompts)]


if __name__ == "__main__":
    workloads = {
        name: {
            "warmup": requests(prompts()[:num_warm], warm_tokens),
            "reps": [requests(prompts(), num_tokens) for _ in range(REPEATS)],
        }
        for name, (prompts, num_tokens, num_warm, warm_tokens) in WORKLOADS.items()
    }
    Path(sys.argv[1]).write_text(json.dumps({"workloads": workloads}))
