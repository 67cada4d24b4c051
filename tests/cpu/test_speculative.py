"""N-gram drafts against a search written out, and which samples count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.sampling.drafter import NO_DRAFT, DraftBatch, NgramDrafter, num_proved


def array(tokens: list[int]) -> Int32s:
    return np.array(tokens, np.int32)


def propose(tokens: list[int], max_drafts: int = 4, longest: int = 4, shortest: int = 1) -> list[int]:
    drafter = NgramDrafter(Speculation(prompt_lookup_max=longest, prompt_lookup_min=shortest))
    (drafts,) = drafter.before(DraftBatch([0], [array(tokens)], [max_drafts], [None]))
    found: list[int] = drafts.tolist()
    return found


def by_hand(tokens: list[int], max_drafts: int, longest: int, shortest: int) -> list[int]:
    """The longest n first, then from the right; the copy may run into itself."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                copy = list(tokens)
                for offset in range(max_drafts):
                    copy.append(copy[end + offset])
                return copy[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 2, 3], [4, 5, 6, 7]),
        ([1, 2, 3, 9, 9, 5, 2, 3, 8, 8, 1, 2, 3], [9, 9, 5, 2]),  # three that match count more than two nearby
        ([7, 1, 5, 7, 2, 6, 7], [2, 6, 7, 2]),  # of equals the most recent, and on into the copy
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts_are_the_tokens_that_followed_the_same_ngram(tokens, expected):
    assert propose(tokens) == expected


def test_too_short_a_match_is_none():
    assert propose([1, 2, 3, 9, 2, 3], shortest=2) == [9, 2, 3, 9]
    assert propose([1, 2, 3, 9, 2, 3], shortest=3) == []
    assert propose([1, 2, 3, 9, 2, 3], longest=1) == [9, 2, 3, 9]


@settings(max_examples=examples(500))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 5), st.integers(0, 4))
def test_any_sequence_gives_the_drafts_of_the_search_by_hand(tokens, max_drafts, longest, less):
    shortest = max(1, longest - less)
    assert propose(tokens, max_drafts, longest, shortest) == by_hand(tokens, max_drafts, longest, shortest)


def test_every_sequence_of_a_batch_gets_drafts_of_its_own():
    batch = DraftBatch([4, 7, 2], [array([1, 2, 1]), array([1, 2, 3]), array([5, 5])], [2, 4, 3], [None] * 3)
    drafts = NgramDrafter(Speculation()).before(batch)
    assert [tokens.tolist() for tokens in drafts] == [[2, 1], [], [5, 5, 5]]


@pytest.mark.parametrize(
    ("sampled", "drafts", "kept"),
    [
        ([5], [NO_DRAFT], [1]),
        ([5, 6, 7], [5, 6, NO_DRAFT], [3]),
        ([5, 6, 7], [5, 0, NO_DRAFT], [2]),
        ([5, 6, 7], [0, 6, NO_DRAFT], [1]),  # a right draft after a wrong one does not count
        ([5, 6, 7, 8, 9, 1], [5, NO_DRAFT, NO_DRAFT, 8, 9, NO_DRAFT], [2, 1, 3]),
    ],
)
def test_samples_count_up_to_the_first_that_was_not_drafted(sampled, drafts, kept):
    ends = np.flatnonzero(np.array(drafts) == NO_DRAFT)
    starts = np.concatenate(([0], ends[:-1] + 1))
    assert num_proved(np.array(sampled), np.array(drafts), starts).tolist() == kept
