"""Masks that change with each token, from a toy source, through forks, preemption, resumption and drafts.

tests/cpu/test_input_batch_streams.py compares them with a plain model under all events of sequences.
"""

import math
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.cpu.test_model_runner_drafts import Parrot
from tests.driver import GREEDY, Driver, make_prompt, new_request
from tests.parity_mask import ParityMask
from vllm_lite.protocol.params import LogitRules
from vllm_lite.protocol.step import Continue, Draft, Finish, Fork, Preempt, Resume
from vllm_lite.structured.sources.source import ALL_BITS, MaskSource
from vllm_lite.worker.sampling.masks import BROKEN, SequenceMask, TokenMasks

MASKED = msgspec.structs.replace(GREEDY, rules=LogitRules())
PROMPT = make_prompt(20, seed=8)


@pytest.fixture
def masked(tiny_checkpoint: Path) -> Driver:
    driver = Driver(tiny_checkpoint)
    driver.rules.mask_source_of = lambda _: ParityMask(384)
    return driver


def follows_rule(tokens: list[int]) -> bool:
    return not any(first % 2 and second % 2 for first, second in pairwise(tokens))


def uninterrupted(driver: Driver, count: int) -> list[int]:
    """The masked continuation of PROMPT; the driver is as new afterwards."""
    driver.run(new_request(9, PROMPT, [30, 31, 32], sampling=MASKED))
    driver.decode(9, count=count - 1)
    driver.run(Finish(9))
    tokens = driver.got.pop(9)
    assert follows_rule(tokens)
    return tokens


def test_a_masked_sequence_stays_within_its_mask_and_its_neighbour_is_free(masked: Driver) -> None:
    masked.run(new_request(0, PROMPT, [1, 2, 3], sampling=MASKED), new_request(1, PROMPT, [4, 5, 6]))
    masked.decode(0, 1, count=12)
    assert follows_rule(masked.got[0])
    assert not follows_rule(masked.got[1]), "or the mask has nothing to do"
    first = next(at for at, (one, other) in enumerate(zip(*masked.got.values(), strict=True)) if one != other)
    assert masked.got[0][first - 1] % 2


def test_preempted_resumed_and_forked_sequences_continue_with_their_masks(masked: Driver) -> None:
    expected = uninterrupted(masked, 14)
    masked.run(new_request(0, PROMPT, [1, 2, 3], sampling=MASKED))
    masked.decode(0, count=4)
    masked.run(Preempt(0))
    masked.run(Resume(0, 0, 0, 25, [[7, 8, 9]]))
    masked.decode(0, count=2)
    masked.run(Fork(0, 1, MASKED, 24, 23, 24), Continue(1, 1, []), Continue(0, 1, []))
    masked.decode(0, count=5)
    assert masked.got[0] == expected
    assert masked.got[1] == expected[4:5], "the fork knows the output that it begins with"


def test_drafts_change_no_token_of_a_masked_sequence(masked: Driver) -> None:
    expected = uninterrupted(masked, 14)
    odd = next(at for at in range(len(expected)) if expected[at] % 2)
    for wrong in ((), (20 + odd + 1,), (22, 25)):
        drafts = Parrot(PROMPT + expected + [0] * 9, wrong)
        if wrong == (20 + odd + 1,):
            drafts.tokens[wrong[0]] = 7  # which the mask rules out there
        masked.drafts.drafter = drafts
        masked.run(new_request(0, PROMPT, [1, 2, 3], sampling=MASKED))
        while len(masked.got[0]) < 14:
            masked.run(Draft(0, 4, []))
        masked.run(Finish(0))
        assert masked.got.pop(0)[:14] == expected


def test_a_sequence_that_breaks_its_mask_fails_alone(masked: Driver) -> None:
    """A fork may begin with an output that its own mask refuses."""
    masked.run(new_request(0, PROMPT, [1, 2, 3]))
    while follows_rule(masked.got[0]):
        masked.decode(0, count=1)
    length = 20 + len(masked.got[0])
    output = masked.run(Fork(0, 1, MASKED, length, length - 1, length), Continue(1, 1, []), Continue(0, 1, []))
    assert output.failed == [(1, BROKEN)]


def test_no_source_is_made_for_sequences_without_rules(tiny_checkpoint: Path) -> None:
    asked: list[object] = []

    def source_of(sampling: object) -> MaskSource | None:
        asked.append(sampling)
        return None

    driver = Driver(tiny_checkpoint)
    driver.rules.mask_source_of = source_of
    driver.run(new_request(0, PROMPT, [1, 2, 3]), new_request(1, PROMPT, [4, 5, 6], sampling=MASKED))
    assert asked == [MASKED]


@pytest.mark.parametrize("vocab_size", [5, 32, 50, 384])
def test_bits_are_tokens(vocab_size: int) -> None:
    allowed = np.random.default_rng(vocab_size).integers(0, 2, (2, vocab_size)).astype(bool)
    bitmasks = np.zeros((2, -(-vocab_size // 32)), np.uint32)
    for row, tokens in zip(bitmasks, allowed, strict=True):
        for token in np.flatnonzero(tokens).tolist():
            row[token // 32] |= np.uint32(1 << token % 32)
    logits = torch.ones(4, vocab_size)
    logits[2, 3] = math.nan
    TokenMasks(np.array([3, 0]), bitmasks).apply(logits)
    assert (torch.isinf(logits[[3, 0]]).numpy() == ~allowed).all()
    assert not torch.isinf(logits[1:3]).any()
    assert math.isnan(logits[2, 3])


def test_a_mask_hides_no_fault_of_the_model() -> None:
    logits = torch.full((1, 5), math.nan)
    TokenMasks(np.array([0]), np.array([[1]], np.uint32)).apply(logits)
    assert logits.isnan().all()


def test_no_draft_stays_accepted() -> None:
    source = ParityMask(40)
    mask = SequenceMask(source, num_prompt=2)
    bitmasks = np.full((3, 2), ALL_BITS, np.uint32)
    mask.fill(np.array([5, 5, 6, 7, 9], np.int32), bitmasks)
    assert source.output == [6], "7 and 9 were drafts"
    assert [f"{int(row[0]) & 15:04b}" for row in bitmasks] == ["1111", "0101", "1111"], "9 behind 7 is refused"
    mask.fill(np.array([5, 5, 6, 8], np.int32), bitmasks[:1])
    assert source.output == [6, 8]
