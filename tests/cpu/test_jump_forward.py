"""Forced tokens as drafts: fewer steps, the same tokens, the same distribution."""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.chain_mask import CHOICES, PERIOD, ChainMask
from tests.driver import GREEDY, WARM, Driver, make_prompt, new_request
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import Continue, Draft, Finish, Preempt, Resume
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafter, GrammarDrafter, Int32s, NgramDrafter
from vllm_lite.worker.sampling.masks import SequenceMask

PROMPT = make_prompt(20, seed=8)
NGRAMS = NgramDrafter(Speculation())


def guided(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, rules=LogitRules())


@pytest.fixture
def chained(tiny_checkpoint: Path) -> Driver:
    """A worker in which all sequences with rules follow a ChainMask."""
    driver = Driver(tiny_checkpoint, max_num_batched_tokens=256)
    driver.rules.mask_source_of = lambda _: ChainMask(384)
    return driver


def generate(driver: Driver, sampling: Sampling, count: int, max_drafts: int) -> tuple[list[int], int]:
    """`count` tokens of a sequence beside one without a grammar, and in how many steps they came."""
    driver.got = {}
    driver.run(new_request(1, PROMPT[:5], [20, 21, 22, 23]), new_request(0, PROMPT, [1, 2, 3, 4], sampling=sampling))
    num_steps = 1
    while len(driver.got[0]) < count:
        driver.run(Draft(0, max_drafts, []) if max_drafts else Continue(0, 1, []), Continue(1, 1, []))
        num_steps += 1
    driver.run(Finish(0), Finish(1))
    return driver.got[0][:count], num_steps


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("other", [None, NGRAMS], ids=["forced", "and n-grams"])
def test_forced_tokens_take_fewer_steps_and_are_the_same(
    chained: Driver, sampling: Sampling, other: Drafter | None
) -> None:
    sampling = guided(sampling)
    plain, num_plain = generate(chained, sampling, 5 * PERIOD, 0)
    assert num_plain == 5 * PERIOD
    chained.drafts.drafter = GrammarDrafter(other)
    for max_drafts in (1, 2, 8):
        drafted, num_steps = generate(chained, sampling, 5 * PERIOD, max_drafts)
        assert drafted == plain
        # Tokens forced by a choice are known in the next step, which ends with the next choice: two choices a period.
        steps = {1: 16, 2: 16, 8: 11}[max_drafts]
        assert num_steps == steps if other is None else num_steps <= steps


def test_a_draft_that_forces_nothing_is_a_plain_decode(chained: Driver) -> None:
    """The step is a steady one, whose inputs are not built anew."""
    runner = chained.worker.runner
    chained.run(new_request(0, PROMPT, [1, 2, 3]))
    made = runner.batch.build
    are_steady = []

    def build() -> object:
        inputs = made()
        are_steady.append(inputs.is_steady)
        return inputs

    runner.batch.build = build  # type: ignore[method-assign,assignment]
    for _ in range(3):
        assert chained.run(Draft(0, 4, [])).drafted is None
    assert are_steady == [False, True, True]


def test_tokens_follow_the_distribution_of_the_masked_logits(chained: Driver) -> None:
    """The first choice, and the one that is drawn behind drafts, over many seeds: chi-square of 4 tokens."""
    runner = chained.worker.runner
    seen: list[torch.Tensor] = []
    sample = runner.sampler.sample

    def watch(logits: torch.Tensor, inputs: object) -> object:
        seen.append(logits.clone())
        return sample(logits, inputs)  # type: ignore[arg-type]

    runner.sampler.sample = watch  # type: ignore[method-assign,assignment]
    counts: Counter[int] = Counter()
    num_seeds = 400
    for first in range(0, num_seeds, 8):
        seeds = range(first, first + 8)
        chained.got = {}
        arrivals = [
            new_request(
                seed - first,
                PROMPT,
                [1 + 3 * (seed - first) + i for i in range(3)],
                sampling=guided(msgspec.structs.replace(WARM, seed=seed * 7919)),
            )
            for seed in seeds
        ]
        chained.run(*arrivals)
        while min(len(tokens) for tokens in chained.got.values()) < PERIOD + 1:
            chained.run(*(Draft(handle, 8, []) for handle in range(8)))
        counts.update(tokens[0] for tokens in chained.got.values())
        for tokens in chained.got.values():
            source = ChainMask(384)
            assert all(map(source.accept, tokens))
        chained.run(*map(Finish, range(8)))
    weights = (seen[0][0, list(CHOICES)] / WARM.temperature).softmax(0).numpy()
    expected = weights * num_seeds
    assert expected.min() > 5, "or chi-square says nothing"
    found = np.array([counts[token] for token in CHOICES])
    assert ((found - expected) ** 2 / expected).sum() < 16.3  # exceeded once in 1000 times, with other seeds


def test_preempted_sequences_continue_with_drafts(chained: Driver) -> None:
    sampling = guided(WARM)
    plain, _ = generate(chained, sampling, 20, 0)
    chained.got = {}
    chained.run(new_request(0, PROMPT, [1, 2, 3], sampling=sampling))
    chained.run(Draft(0, 8, []))
    assert len(chained.got[0]) == 5, "the choice's consequences, and one more"
    chained.run(Preempt(0))
    chained.run(Resume(0, 0, 0, 25, [[7, 8, 9]]))
    while len(chained.got[0]) < 20:
        chained.run(Draft(0, 3, []))
    assert chained.got[0][:20] == plain


# ---- the drafter by itself


class Fixed(Drafter):
    """Drafts the same for every sequence, as far as there is room."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens, np.int32)
        self.asked: list[list[int]] = []

    def before(self, batch: DraftBatch) -> list[Int32s]:
        self.asked += [tokens.tolist() for tokens in batch.tokens]
        return [self.tokens[:most] for most in batch.max_drafts]


def draft(other: Drafter | None, *output: int, most: int = 8, masked: bool = True) -> list[int]:
    mask = SequenceMask(ChainMask(384), 1) if masked else None
    (drafts,) = GrammarDrafter(other).before(DraftBatch([3], [np.array([5, *output], np.int32)], [most], [mask]))
    found: list[int] = drafts.tolist()
    return found


def test_forced_tokens_come_first_and_others_behind_them_as_far_as_they_may() -> None:
    assert draft(None) == [], "there is a choice"
    assert draft(None, 41) == [111, 121, 131]
    assert draft(None, 41, most=2) == [111, 121]
    assert draft(None, 41, 111, 121, 131, 8) == [7], "and then there is a choice"
    assert draft(None, 41, 112) == [], "a token that may not stand here forces nothing"
    other = Fixed(10, 7, 42, 3)
    assert draft(other, 41) == [111, 121, 131, 10, 7, 42], "3 does not follow from 42"
    assert other.asked == [[5, 41, 111, 121, 131]], "it goes on behind what is forced"
    assert draft(other, 41, most=4) == [111, 121, 131, 10]
    assert draft(other, 41, most=2) == [111, 121]
    assert draft(other) == [], "10 is no choice"
    assert draft(other, 41, 112) == []
    assert draft(other, masked=False) == [10, 7, 42, 3]


def test_sequences_keep_their_order() -> None:
    tokens = [np.array(each, np.int32) for each in ([5, 41], [5], [5, 42])]
    masks = [SequenceMask(ChainMask(384), 1), None, SequenceMask(ChainMask(384), 1)]
    batch = DraftBatch([8, 9, 4], tokens, [2, 1, 5], masks)
    drafts = [each.tolist() for each in GrammarDrafter(Fixed(6)).before(batch)]
    assert drafts == [[111, 121], [6], [112, 122, 132, 6]]
