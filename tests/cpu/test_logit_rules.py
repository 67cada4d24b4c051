"""Rules for logits: their order, each one compared with transformers, and the resulting distributions.

tests/cpu/test_input_batch_streams.py compares them with a plain model under all events of sequences.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cpu.test_sampler import CPU, NUM_DRAWS, chi_squared, filtered, many_seeds
from tests.plain_rules import changed
from vllm_lite.protocol.params import Sampling, SamplingParams
from vllm_lite.protocol.step import NOT_FINITE
from vllm_lite.worker.sampling.logit_rules import RuleBook, read_rules
from vllm_lite.worker.sampling.penalties import TokenCounts
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, SampleInputs, Sampler, row_params

VOCAB = 40
STOPS = (1, 2)


def wire(params: SamplingParams, num_prompt: int) -> Sampling:
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=0,
        min_tokens_until=num_prompt + params.min_tokens if params.min_tokens else 0,
        stop_ids=STOPS,
        rules=params.logit_rules(),
    )


def inputs_of(
    prompt: list[int], output: list[int], params: SamplingParams, vocab_size: int, count: int
) -> SampleInputs:
    """`count` samples of one sequence, with seeds of their own."""
    tokens = np.array([prompt + output], np.int32)
    book = RuleBook(1, vocab_size, 100)
    sampling = wire(params, len(prompt))
    entry = book.add(read_rules(sampling, len(prompt), vocab_size, None), tokens[0])
    rows = np.zeros(count, np.int64)
    draws = np.array([row_params(sampling, entry)] * count, ROW_PARAMS)
    draws["seed"] = many_seeds(count)
    positions = np.full(count, tokens.shape[1])
    return SampleInputs(draws, positions, book.edits(draws["rules"], positions, rows, tokens))


def after_rules(logits: torch.Tensor, prompt: list[int], output: list[int], **fields: Any) -> torch.Tensor:
    """Apply rules to one row of logits, [vocab], and compare it with the plain twin."""
    params = SamplingParams(**fields)
    inputs = inputs_of(prompt, output, params, len(logits), 1)
    row = logits.clone()[None]
    if inputs.edits is not None:
        inputs.edits.apply(row)
    np.testing.assert_allclose(row[0], changed(logits.numpy(), params, prompt, output, STOPS), rtol=1e-6, atol=1e-6)
    return row[0]


def random_logits(seed: int = 0) -> torch.Tensor:  # [VOCAB]
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


PROMPT, OUTPUT = [3, 4, 5, 5, 6], [7, 8, 7, 3, 9]


def test_the_order_of_the_rules() -> None:
    """Bias, then the repetition penalty, then the other penalties; excluded tokens stay excluded."""
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, 0.0])
    got = after_rules(
        logits,
        [0],
        [1, 1, 2, 3],
        logit_bias={0: 1.0, 1: 3.0, 3: -2.0, 5: 100.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        allowed_token_ids=[0, 1, 2, 3, 4],
        bad_words_token_ids=[[4]],
    )
    expected = [(1 + 1) / 2, (-1 + 3) / 2 - 2 * 0.25 - 0.5, 2 / 2 - 0.75, (-2 - 2) * 2 - 0.75, -math.inf, -math.inf]
    assert got.tolist() == pytest.approx(expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    got = after_rules(torch.zeros(10), [1, 1, 2], [2, 3, 3], presence_penalty=1.0, frequency_penalty=0.5)
    assert got.tolist() == [0, 0, -1.5, -2.0, 0, 0, 0, 0, 0, 0]


def test_penalties_may_be_rewards() -> None:
    got = after_rules(torch.ones(5), [0], [1, 1], presence_penalty=-2.0, frequency_penalty=-0.5, repetition_penalty=0.5)
    assert got.tolist() == [2.0, 2.0 + 3.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_agrees_with_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), logits[None].clone())
    torch.testing.assert_close(after_rules(logits, PROMPT, OUTPUT, repetition_penalty=penalty), expected[0])


def test_bias_agrees_with_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    bias = {3: 1.5, 9: -7.0, 11: 100.0}
    reference = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = reference(torch.tensor([PROMPT + OUTPUT]), random_logits()[None])
    torch.testing.assert_close(after_rules(random_logits(), PROMPT, OUTPUT, logit_bias=bias), expected[0])


@pytest.mark.parametrize("output", [[], [7], [7, 8], [9, 7, 8], [8, 8], [7, 8, 9]])
def test_bad_words_match_transformers(output: list[int]) -> None:
    """Unlike transformers, words are searched in the output only. So the prompt here has no beginning of a word."""
    from transformers import NoBadWordsLogitsProcessor

    words = [[7, 8, 9], [8, 8], [12], [9, 10], [7, 13]]
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([PROMPT + output]), random_logits()[None])
    got = after_rules(random_logits(), PROMPT, output, bad_words_token_ids=words)
    torch.testing.assert_close(got, expected[0])


def test_a_bad_word_that_the_prompt_began_may_be_completed() -> None:
    words = [[5, 6, 7], [7, 7]]
    assert torch.isfinite(after_rules(random_logits(), [5, 6], [], bad_words_token_ids=words)).all()
    assert torch.isfinite(after_rules(random_logits(), [5], [6], bad_words_token_ids=words)).all()
    assert after_rules(random_logits(), [1], [5, 6], bad_words_token_ids=words)[7] == -math.inf


@pytest.mark.parametrize("num_output", [0, 3, 4, 5])
def test_min_tokens_match_transformers(num_output: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    output = OUTPUT[:num_output]
    reference = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, list(STOPS))
    expected = reference(torch.tensor([PROMPT + output]), random_logits()[None])
    got = after_rules(random_logits(), PROMPT, output, min_tokens=4)
    torch.testing.assert_close(got, expected[0])
    assert bool(torch.isfinite(got[list(STOPS)]).all()) == (num_output >= 4)


@pytest.mark.parametrize("min_p", [0.05, 0.3])
def test_min_p_agrees_with_transformers(min_p: float) -> None:
    from transformers import MinPLogitsWarper

    logits = random_logits()
    warped = MinPLogitsWarper(min_p)(torch.LongTensor([PROMPT]), logits[None].clone() / 1.5)
    inputs = inputs_of(PROMPT, [], SamplingParams(temperature=1.5, min_p=min_p), VOCAB, 4000)
    drawn = Sampler(VOCAB, CPU).sample(logits.expand(4000, -1).clone(), inputs).tokens
    assert set(drawn.tolist()) == set(torch.isfinite(warped[0]).nonzero().squeeze(1).tolist())


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.8, "temperature": 0.7},
    {"frequency_penalty": -0.3, "repetition_penalty": 1.3, "min_p": 0.15},
    {"logit_bias": {0: 1.0, 4: 3.5, 2: -100.0}, "presence_penalty": 0.5, "top_p": 0.8},
    {"allowed_token_ids": [1, 3, 4, 6], "frequency_penalty": 0.6, "top_k": 3},
    {"bad_words_token_ids": [[2], [3, 3, 7]], "repetition_penalty": 0.8, "min_p": 0.1, "top_k": 6},
]


@pytest.mark.parametrize("rules", RULES)
def test_draws_follow_the_softmax_that_rules_and_filters_leave(rules: dict[str, Any]) -> None:
    logits = torch.tensor([0.3, -1.1, 2.0, 1.2, -3.0, 0.9, -0.2, 1.6])
    prompt, output = [5, 6], [2, 7, 2, 0, 3, 3]
    params = SamplingParams(**rules)
    row = changed(logits.numpy(), params, prompt, output).tolist()
    expected = filtered(row, params.temperature, params.top_k, params.top_p, params.min_p)
    inputs = inputs_of(prompt, output, params, len(logits), NUM_DRAWS)
    tokens = Sampler(len(logits), CPU).sample(logits.expand(NUM_DRAWS, -1).clone(), inputs).tokens.tolist()
    statistic, freedom = chi_squared(tokens, expected)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_an_entry_has_the_rules_of_its_last_sequence() -> None:
    """A sequence that joins in the step in which another leaves gets the same entry."""
    book, tokens = RuleBook(1, VOCAB, 100), np.array([PROMPT], np.int32)
    for token in (3, 4, 5):
        rules: list[dict[str, Any]] = [{"logit_bias": {token: 1.0}}, {"frequency_penalty": 1.0}, {"min_tokens": 2}]
        for fields in rules:
            entry = book.add(read_rules(wire(SamplingParams(**fields), 5), 5, VOCAB, None), tokens[0])
            assert entry == 1
            book.count(np.array([entry]), np.array([token]))
            edits = book.edits(np.array([entry]), np.array([5]), np.array([0]), tokens)
            assert edits is not None
            row = torch.zeros(1, VOCAB)
            banned = edits.banned
            replace(edits, banned=None).apply(row)
            expected = {"logit_bias": {token: 1.0}, "frequency_penalty": {token: -1.0}, "min_tokens": {}}
            assert {at: row[0, at].item() for at in row[0].nonzero().flatten().tolist()} == expected[next(iter(fields))]
            assert (banned is not None) == ("min_tokens" in fields)
            book.remove(entry)


def test_a_rule_hides_no_fault_of_the_model() -> None:
    """Also if the faulty token is excluded, because the other logits of such a row are not reliable."""
    logits = random_logits().expand(2, -1).clone()
    logits[1, 30] = math.nan
    inputs = inputs_of(PROMPT, OUTPUT, SamplingParams(allowed_token_ids=[3, 4]), VOCAB, 2)
    sampled = Sampler(VOCAB, CPU).sample(logits, inputs)
    assert sampled.failed == {1: NOT_FINITE}
    assert int(sampled.tokens[0]) in (3, 4)


def test_counts_of_the_longest_sequence_of_different_tokens() -> None:
    counts = TokenCounts(2, vocab_size=9, max_tokens=30)
    counts.start(1, np.array([4]), 1)
    for token in [*range(9), *range(9)]:
        counts.add(np.array([1]), np.array([token]))
    owners, ids, numbers = counts.of(np.array([0, 1]))
    assert (owners.tolist(), sorted(ids.tolist()), numbers.tolist()) == ([1] * 9, list(range(9)), [2] * 9)
    counts.clear(1)
    assert not len(counts.of(np.array([1]))[1])
    counts.start(1, np.array([8]), 0)
    assert [part.tolist() for part in counts.of(np.array([1]))] == [[0], [8], [1]]
