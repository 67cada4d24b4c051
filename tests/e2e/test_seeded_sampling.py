"""A seeded request gives the same tokens whatever the engine does beside it, and they are the ones its seed means."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE
from tests.e2e.reference import NUM_TOKENS, make_prompts, start, tokens_of
from vllm_lite import SamplingParams

PROMPTS = make_prompts((1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 80, 100, 128, 150), seed=3)
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 20},
    {"top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
]
NEAR_TIE = 1e-4
"""Least distance between the best two scores of any draw here, so that float32 rounding decides none of them."""


def params_of(place: int, seed: int | None) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0} | FILTERS[place % len(FILTERS)]), seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True
    )


SEEDED = [params_of(place, seed) for place, seed in enumerate([0, 1, 2**32, 2**64 - 1, *range(100, 112)])]


@pytest.fixture(scope="module")
def llm(llama):
    with start(llama.path, block_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm) -> list[list[int]]:
    """The tokens of each request with nothing beside it."""
    return [tokens_of(llm.generate(prompt, SEEDED[i], use_tqdm=False))[0] for i, prompt in enumerate(PROMPTS)]


def gumbel(seed: int, position: int, sample: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:  # [vocab]
    """The noise of every token: Murmur3's rounds over (seed, sample, position, token), as the sampler defines it."""

    def rotl(value: Any, bits: int) -> Any:
        return (value << bits | value >> (32 - bits)) & 0xFFFFFFFF

    tokens = np.arange(VOCAB_SIZE, dtype=np.uint64)
    state: Any = (seed & 0xFFFFFFFF) ^ 0x9E3779B9
    for key in (seed >> 32, sample, position, tokens):
        scrambled = rotl(key * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotl(state ^ scrambled, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state = (state ^ state >> np.uint64(16)) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> np.uint64(13)) * 0xC2B2AE35 & 0xFFFFFFFF
    state ^= state >> np.uint64(16)
    v = ((state & 0x7FFFFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(float.fromhex("0x1.fffffep-32"))
    noise: np.ndarray[Any, np.dtype[np.float64]] = -np.log(-np.log1p(-v.astype(np.float64)))
    return noise


def draw(logits: torch.Tensor, params: SamplingParams, position: int, sample: int = 0) -> tuple[int, float]:
    """The token that the documents promise, and by how much it won."""
    scaled = (logits - logits.max()).double().numpy() / params.temperature
    order = np.argsort(-scaled, kind="stable")[: params.top_k or None]
    mass = np.exp(scaled[order])
    before = np.cumsum(mass) - mass
    kept = order[(before < params.top_p * mass.sum()) & (mass >= params.min_p)]
    noisy = (scaled + gumbel(params.seed or 0, position, sample))[kept]
    winner, scores = kept[np.argmax(noisy)], np.sort(noisy)
    return int(winner), float(scores[-1] - scores[-2]) if len(kept) > 1 else np.inf


def test_tokens_are_the_ones_that_the_seed_means(llama, alone):
    """Logits by transformers, filters and noise written again from their definition."""
    least = np.inf
    for prompt, params, tokens in zip(PROMPTS, SEEDED, alone, strict=True):
        for at, row in enumerate(llama.logits(prompt, tokens)):
            expected, margin = draw(row, params, len(prompt) + at)
            assert tokens[at] == expected
            least = min(least, margin)
    print(f"closest draw won by {least:.1e}")
    assert least > NEAR_TIE, "choose other seeds: these let rounding decide"


def test_all_at_once_with_cached_prompts(llm, alone):
    outputs = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
    assert tokens_of(outputs) == alone
    assert sum(output.num_cached_tokens or 0 for output in outputs) > sum(map(len, PROMPTS)) / 2


def test_in_another_order_and_company(llm, alone):
    half = range(len(PROMPTS) - 1, 0, -2)
    noise = [SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)] * len(half)
    prompts = [PROMPTS[i] for i in half]
    outputs = llm.generate(prompts + prompts, [SEEDED[i] for i in half] + noise, use_tqdm=False)
    assert tokens_of(outputs[: len(half)]) == [alone[i] for i in half]


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"max_num_batched_tokens": 3, "enable_prefix_caching": False, "block_size": 8}, False),
        ({"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 26}, True),
        ({"max_num_batched_tokens": 64, "enable_prefix_caching": False, "num_gpu_blocks_override": 14}, True),
    ],
    ids=["chunks-of-3", "preempted", "preempted-without-cache"],
)
def test_in_another_engine(llama, alone, settings, preempts):
    with start(llama.path, **settings) as llm:
        assert tokens_of(llm.generate(PROMPTS, SEEDED, use_tqdm=False)) == alone
        stats = llm.stats()
    print(stats)
    assert (stats.preemptions > 0) == preempts


def test_different_seeds_differ(llm):
    prompt = PROMPTS[6]
    tokens = tokens_of(llm.generate([prompt] * 20, [params_of(0, seed) for seed in range(20)], use_tqdm=False))
    assert len({tuple(each) for each in tokens}) == 20
    assert len({each[0] for each in tokens}) > 5


def test_without_a_seed_no_two_runs_are_equal(llm):
    prompt, unseeded = PROMPTS[6], params_of(0, None)
    together = llm.generate([prompt, prompt], unseeded, use_tqdm=False)
    later = llm.generate(prompt, unseeded, use_tqdm=False)
    assert len({tuple(tokens) for tokens in tokens_of(together + later)}) == 3
