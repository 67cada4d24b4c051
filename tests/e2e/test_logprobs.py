"""Logprobs and ranks in float32 equal transformers', including after cache hits, chunks and preemptions."""

import pytest
import torch

from tests.e2e.reference import NUM_TOKENS, compare, start
from vllm_lite import CompletionOutput, SamplingParams

NUM_TOP = 5
MAX_DIFFERENCE = 1e-4
SLACK = 2 * MAX_DIFFERENCE
"""Tokens that are closer than this may change their ranks."""
SETTINGS = {"max_num_batched_tokens": 64, "block_size": 8, "num_gpu_blocks_override": 44}
"""Prompts in chunks, some of them cached, and a pool that makes requests lose their blocks."""


def worst_difference(completion: CompletionOutput, logits: torch.Tensor) -> float:
    """The largest difference between a continuation's logprobs and those of `logits`. Also checks ranks and sums."""
    assert completion.logprobs is not None
    worst = total = 0.0
    expected = logits.log_softmax(-1)
    for token, candidates, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        assert next(iter(candidates)) == token, "the sampled token comes first, then the best, best first"
        ranks = [candidate.rank for candidate in candidates.values()]
        assert ranks[1:] == sorted(ranks[1:])
        assert set(ranks) == {*range(1, NUM_TOP + 1), ranks[0]}
        for other, candidate in candidates.items():
            worst = max(worst, abs(candidate.logprob - float(row[other])))
            better, not_worse = (int((row > row[other] + slack).sum()) for slack in (SLACK, -SLACK))
            assert better < candidate.rank <= not_worse
        total += candidates[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
    return worst


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_top_logprobs_of_greedy_tokens(references, family):
    cases = references[family].cases
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
    with start(references[family].path, **SETTINGS) as llm:
        outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    wrong, excused = compare(cases, outputs)
    assert not wrong
    right = [index for index in range(len(cases)) if index not in excused]
    worst = max(worst_difference(outputs[index].outputs[0], cases[index].logits) for index in right)
    print(f"{family}: largest difference {worst:.1e} after {stats.preemptions} preemptions")
    assert worst < MAX_DIFFERENCE


def test_tokens_that_are_named_have_theirs_in_every_step(llama):
    """Includes steps of decoding only, and steps with requests for the most likely tokens."""
    ids = (7, 3, 300)
    cases = llama.cases[:6]
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
    named = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprob_token_ids=ids)
    prompts = [case.prompt for case in cases]
    with start(llama.path, **SETTINGS) as llm:
        outputs = llm.generate(prompts, [named, plain] * 3, use_tqdm=False)
    for prompt, output in zip(prompts[::2], outputs[::2], strict=True):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        expected = llama.logits(prompt, completion.token_ids).log_softmax(-1)
        for token, candidates, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
            assert list(candidates) == [token, *(other for other in ids if other != token)]
            assert all(abs(found.logprob - float(row[other])) < MAX_DIFFERENCE for other, found in candidates.items())
            assert {found.rank for other, found in candidates.items() if other != token} <= {0}
    for output in outputs[1::2]:
        assert {len(candidates) for candidates in output.outputs[0].logprobs or ()} <= {NUM_TOP, NUM_TOP + 1}


def test_logprobs_of_random_tokens_match_the_raw_logits(llama):
    """Temperature and filters change the sampled token, not the reported logprobs. A rare token is reported beside the
    best ones."""
    prompts = [case.prompt for case in llama.cases[:12]]
    params = [
        SamplingParams(temperature=2.0, seed=place, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
        for place in range(len(prompts))
    ]
    with start(llama.path, **SETTINGS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    worst, num_rare = 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        worst = max(worst, worst_difference(completion, llama.logits(prompt, completion.token_ids)))
        num_rare += sum(len(candidates) == NUM_TOP + 1 for candidates in completion.logprobs or [])
    print(f"largest difference {worst:.1e}, {num_rare} tokens outside the best {NUM_TOP}")
    assert worst < MAX_DIFFERENCE
    assert num_rare > 100
