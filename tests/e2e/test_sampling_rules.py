"""Requests with rules for their logits, through all processes, in float32: each token is the one that transformers'
logits, the rules written down plainly, and the seed's noise lead to, whatever happens beside the request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE
from tests.e2e.reference import DEADLINE_S, NUM_TOKENS, Reference, make_prompts, start, tokens_of
from tests.e2e.test_blocks_e2e import NGRAM, SWAP
from tests.e2e.test_seeded_sampling import NEAR_TIE, draw
from tests.plain_rules import changed
from vllm_lite import LLM, AsyncClient, RequestOutput, SamplingParams

PROMPTS = make_prompts((1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 80, 100, 128, 150), seed=5)
FEW = list(range(3, 40))
GREEDY: dict[str, Any] = {"temperature": 0.0}
RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, **GREEDY},
    {"frequency_penalty": 0.7, "allowed_token_ids": FEW},
    {"repetition_penalty": 1.4, **GREEDY},
    {"logit_bias": {7: 3.0, 9: 4.0, 11: -100.0}, "presence_penalty": -1.0},
    {"allowed_token_ids": FEW, "frequency_penalty": 2.0, "repetition_penalty": 1.1, **GREEDY},
    {},
    {"bad_words_token_ids": [[token] for token in range(3, 200)], "temperature": 0.8, "top_k": 9},
    {"allowed_token_ids": FEW[:4], "bad_words_token_ids": [[3, 4], [5, 5, 6], [6]], "top_p": 0.95},
    {"frequency_penalty": -0.5, "presence_penalty": 2.0, "repetition_penalty": 0.9, "min_p": 0.01},
    GREEDY,
]


def params_of(place: int, **more: Any) -> SamplingParams:
    rules = {"temperature": 1.0, "ignore_eos": True} | RULES[place % len(RULES)]
    return SamplingParams(**(rules | {"seed": 50 + place, "max_tokens": NUM_TOKENS} | more))


PARAMS = [params_of(place) for place in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def llm(llama: Reference) -> Any:
    with start(llama.path, block_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of each request with nothing beside it."""
    return [tokens_of(llm.generate(prompt, PARAMS[i], use_tqdm=False))[0] for i, prompt in enumerate(PROMPTS)]


def closest(
    reference: Reference, prompt: list[int], tokens: list[int], params: SamplingParams, index: int = 0
) -> float:
    """By how much the closest of these draws was won. Fails if one of them should have been another."""
    least = np.inf
    for at, raw in enumerate(reference.logits(prompt, tokens)):
        row = torch.from_numpy(changed(raw.numpy(), params, prompt, tokens[:at], params.stop_token_ids))
        if params.greedy:
            best = row.topk(2)
            expected, margin = int(best.indices[0]), float(best.values[0] - best.values[1])
        else:
            expected, margin = draw(row, params, len(prompt) + at, index)
        assert tokens[at] == expected, f"token {at} of {params}"
        least = min(least, margin)
    return least


def test_tokens_are_the_ones_that_rules_and_seed_mean(llama: Reference, alone: list[list[int]]) -> None:
    least = min(closest(llama, *case) for case in zip(PROMPTS, alone, PARAMS, strict=True))
    print(f"closest draw won by {least:.1e}")
    assert least > NEAR_TIE, "choose other seeds: these let rounding decide"
    ruled = [bool(changed(np.zeros(VOCAB_SIZE, np.float32), params, [1], [2]).any()) for params in PARAMS]
    assert sum(ruled) > len(PARAMS) / 2


def test_all_at_once_with_cached_prompts(llm: LLM, alone: list[list[int]]) -> None:
    assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"max_num_batched_tokens": 5, "enable_prefix_caching": False, "block_size": 8}, False),
        ({"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 26}, True),
        ({"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 26, **SWAP}, True),
        ({"max_num_batched_tokens": 64, "num_gpu_blocks_override": 14, "async_scheduling": False}, True),
        ({"speculative_config": NGRAM, "disable_adaptive_drafts": True}, False),
    ],
    ids=["chunks-of-5", "preempted", "swapped", "preempted-one-step-at-a-time", "speculating"],
)
def test_in_another_engine(llama: Reference, alone: list[list[int]], settings: dict[str, Any], preempts: bool) -> None:
    with start(llama.path, **settings) as llm:
        assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
        stats = llm.stats()
    print(stats)
    assert (stats.preemptions > 0) == preempts
    assert (stats.swaps > 0) == ("swap_space" in settings)


def test_samples_of_one_prompt_count_their_own_tokens(llm: LLM, llama: Reference) -> None:
    prompt, rules = PROMPTS[9], {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "allowed_token_ids": FEW}
    params = params_of(5, n=4, **rules)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    for sample in output.outputs:
        assert closest(llama, prompt, sample.token_ids, params, index=sample.index) > NEAR_TIE


async def test_a_fork_counts_inherited_tokens(llm: LLM) -> None:
    """The fork has its parent's rules and takes the best token, so it must continue with the same tokens."""
    params = params_of(4, max_tokens=300)

    async with asyncio.timeout(DEADLINE_S):
        async with AsyncClient(llm.address) as client:
            parent = client.generate(PROMPTS[9], params, "parent")
            output = await anext(parent)
            while len(output.outputs[0].token_ids) < 20:
                output = await anext(parent)
            (fork,) = await client.fork("parent")
            expected, told = await last(parent), await last(fork)
            assert told.outputs[0].token_ids == expected.outputs[0].token_ids


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


@pytest.mark.parametrize("min_tokens", [5, 12])
def test_min_tokens_rule_stops_out_before_penalties_and_bias(llm: LLM, llama: Reference, min_tokens: int) -> None:
    """Bias makes the stop token the most likely one, so it comes as soon as it is allowed."""
    rules: dict[str, Any] = {"logit_bias": {77: 100.0}, "presence_penalty": 0.3, "stop_token_ids": [77]}
    params = params_of(5, min_tokens=min_tokens, **rules)
    (output,) = llm.generate(PROMPTS[8], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert (len(tokens), tokens[-1]) == (min_tokens + 1, 77)
    assert closest(llama, PROMPTS[8], tokens, params) > NEAR_TIE


def test_logprobs_stay_those_of_the_raw_logits(llm: LLM, llama: Reference) -> None:
    params = params_of(4, logprobs=0)
    (completion,) = llm.generate(PROMPTS[4], params, use_tqdm=False)[0].outputs
    raw = llama.logits(PROMPTS[4], completion.token_ids).log_softmax(-1)
    assert completion.logprobs is not None
    for token, row, candidates in zip(completion.token_ids, raw, completion.logprobs, strict=True):
        assert candidates[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


def test_a_request_that_rules_everything_out_fails_alone(llm: LLM, alone: list[list[int]]) -> None:
    from vllm_lite.errors import RequestError

    impossible = params_of(5, allowed_token_ids=[7], bad_words_token_ids=[[7]])
    with pytest.raises(RequestError, match="prompt 1: every token is ruled out"):
        llm.generate([PROMPTS[0], PROMPTS[1]], [PARAMS[0], impossible], use_tqdm=False)
    assert tokens_of(llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)) == alone[:1]


# ---- logprobs of prompts


def assert_prompt_logprobs(reference: Reference, output: RequestOutput, num_top: int) -> None:
    prompt, scores = output.prompt_token_ids, output.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(prompt)
    assert scores[0] is None
    expected = reference.logits(prompt[:1], prompt[1:]).log_softmax(-1)
    for token, candidates, row in zip(prompt[1:], scores[1:], expected, strict=True):
        assert candidates is not None
        assert next(iter(candidates)) == token
        assert {candidate.rank for candidate in candidates.values()} >= set(range(1, num_top + 1))
        assert len(candidates) in (num_top, num_top + 1)
        for other, candidate in candidates.items():
            assert candidate.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert abs(int((row > row[other]).sum()) + 1 - candidate.rank) <= 1  # neighbours may be tied


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"max_num_batched_tokens": 64}, False),
        ({"max_num_batched_tokens": 7, "block_size": 8}, False),
        ({"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 26}, True),
        ({"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 26, **SWAP}, True),
        ({"max_num_batched_tokens": 64, "async_scheduling": False, "num_gpu_blocks_override": 14}, True),
    ],
    ids=["chunks-of-64", "chunks-of-7", "preempted", "swapped", "preempted-one-step-at-a-time"],
)
def test_prompt_logprobs_match_transformers(llama: Reference, settings: dict[str, Any], preempts: bool) -> None:
    """Asked for twice, so that the second time the whole prompt is in the cache; others run beside."""
    asked = [place % 3 if place % 4 else None for place in range(len(PROMPTS))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=num_top)
        for num_top in asked
    ]
    plain = [SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)] * len(PROMPTS)
    with start(llama.path, **settings) as llm:
        expected = tokens_of(llm.generate(PROMPTS, plain, use_tqdm=False))
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert tokens_of(outputs) == expected
            for output, num_top in zip(outputs, asked, strict=True):
                if num_top is None:
                    assert output.prompt_logprobs is None
                else:
                    assert_prompt_logprobs(llama, output, num_top)
                    assert output.num_cached_tokens == 0
        assert (llm.stats().preemptions > 0) == preempts


def test_prompt_logprobs_with_several_samples_come_once(llm: LLM, llama: Reference) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, prompt_logprobs=2)
    (output,) = llm.generate(PROMPTS[11], params, use_tqdm=False)
    assert_prompt_logprobs(llama, output, 2)
    (alone,) = llm.generate(PROMPTS[11], SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [s.token_ids for s in output.outputs] == [s.token_ids for s in alone.outputs]
