"""Suffix drafts against a search written out: own tokens, recent answers, votes, and lengths."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.sampling.drafter import DraftBatch
from vllm_lite.worker.sampling.suffix import (
    MAX_ANSWER_TOKENS,
    MAX_GROUPS,
    SEPARATOR,
    RecentAnswers,
    SuffixDrafter,
    occurrences,
)

GROUP = b"base"


def array(tokens: list[int]) -> Int32s:
    return np.array(tokens, np.int32)


def drafter(**own: Any) -> SuffixDrafter:
    return SuffixDrafter(Speculation(method="suffix", **own))


def propose(by: SuffixDrafter, tokens: list[int], max_drafts: int = 8, group: bytes = GROUP) -> list[int]:
    (drafts,) = by.before(DraftBatch([0], [array(tokens)], [max_drafts], [None], [group]))
    found: list[int] = drafts.tolist()
    return found


def longest_match(tokens: list[int], suffix: list[int]) -> tuple[list[int], int]:
    """Find the places where the longest end of `suffix` ends in `tokens`, and its length."""
    for length in range(min(len(suffix), len(tokens)), 0, -1):
        wanted = suffix[len(suffix) - length :]
        ends = [end for end in range(length - 1, len(tokens)) if tokens[end - length + 1 : end + 1] == wanted]
        if ends:
            return ends, length
    return [], 0


def voted(tokens: list[int], ends: list[int], count: int, least_share: float) -> list[int]:
    """The tokens behind `ends` that most agree on; the last voter's, also those it has not written yet, alone."""
    drafts: list[int] = []
    voters = list(ends)
    while len(drafts) < count:
        if len(voters) == 1 or len(ends) == 1:
            if len(ends) > 1 and least_share * len(ends) > 1:
                return drafts
            copy = list(tokens)
            start = voters[-1] + len(drafts) + 1
            period = len(tokens) - start
            for i in range(count - len(drafts)):
                token = copy[start + i % period] if period > 0 else SEPARATOR
                if token == SEPARATOR:
                    return drafts
                drafts.append(token)
            return drafts
        voters = [end for end in voters if end + 1 + len(drafts) < len(tokens)]
        found = [tokens[end + 1 + len(drafts)] for end in voters]
        if not found:
            return drafts
        counts = Counter(found)
        best = max(counts, key=lambda token: (counts[token], max(i for i, each in enumerate(found) if each == token)))
        if counts[best] < least_share * len(ends) or best == SEPARATOR:
            return drafts
        drafts.append(best)
        voters = [end for end, token in zip(voters, found, strict=True) if token == best]
    return drafts


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [4, 5, 6]),  # three match, so three are drafted
        ([1, 2, 3, 1, 4, 1], [4]),  # of equals the most recent
        ([1, 2, 1, 2, 1, 3, 1], [2]),  # two against one
        ([4, 4, 4], [4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_own_tokens(tokens: list[int], expected: list[int]) -> None:
    assert propose(drafter(), tokens) == expected


def test_a_longer_match_drafts_more() -> None:
    text = list(range(100, 140))
    assert propose(drafter(), [*text, 1, 100, 101]) == [102, 103]
    assert propose(drafter(), [*text, 1, *text[:6]]) == text[6:12]
    assert propose(drafter(suffix_decoding_max_spec_factor=0.5), [*text, 1, *text[:6]]) == text[6:9]
    assert propose(drafter(suffix_decoding_max_tree_depth=2), [*text, 1, *text[:6]]) == text[6:8]


def test_a_rare_continuation_is_not_drafted() -> None:
    tokens = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert propose(drafter(suffix_decoding_min_token_prob=0.25), tokens) == [5]
    assert propose(drafter(suffix_decoding_min_token_prob=0.26), tokens) == []


def test_recent_answers_of_the_group_are_searched() -> None:
    by = drafter()
    by.ended(GROUP, array([7, 8, 9, 10, 11]))
    assert propose(by, [1, 7, 8, 9]) == [10, 11]  # an answer's end ends the draft
    assert propose(by, [1, 7, 8, 9], group=b"other adapter") == []
    assert propose(by, [9, 5, 3, 9]) == [5]  # own tokens win where both match alike
    assert propose(by, [9, 5, 8, 9]) == [10, 11]
    assert propose(by, [10, 11]) == []  # nothing follows, and the next answer is another text


def test_answers_are_bounded() -> None:
    answers = RecentAnswers(max_requests=3)
    for first in range(5):
        answers.add(GROUP, array([first, first + 1]))
    found = answers.of(GROUP)
    assert found is not None
    assert found.tolist() == [2, 3, SEPARATOR, 3, 4, SEPARATOR, 4, 5, SEPARATOR]
    many = RecentAnswers(max_requests=1000)
    for first in range(5):
        many.add(GROUP, np.full(MAX_ANSWER_TOKENS // 2, first, np.int32))
    kept = many.of(GROUP)
    assert kept is not None
    assert len(kept) <= MAX_ANSWER_TOKENS
    assert set(kept.tolist()) == {4, SEPARATOR}
    many.add(GROUP, np.arange(10 * MAX_ANSWER_TOKENS, dtype=np.int32))
    longest = many.of(GROUP)
    assert longest is not None
    assert len(longest) == MAX_ANSWER_TOKENS
    for number in range(MAX_GROUPS):
        many.add(b"%d" % number, array([1]))
    assert many.of(GROUP) is None
    none = RecentAnswers(max_requests=0)
    none.add(GROUP, array([1]))
    assert none.of(GROUP) is None


@settings(max_examples=examples(400))
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1, 0.34, 0.6, 1.0]),
)
def test_any_text_gives_the_drafts_of_the_search_by_hand(
    tokens: list[int], answers: list[list[int]], max_drafts: int, longest: int, least_share: float
) -> None:
    by = drafter(suffix_decoding_max_tree_depth=longest, suffix_decoding_min_token_prob=least_share)
    joined = []
    for answer in answers:
        by.ended(GROUP, array(answer))
        joined += [*answer, SEPARATOR]
    suffix = tokens[-longest:]
    ends, length = longest_match(tokens[:-1], suffix)
    source = tokens
    others, longer = longest_match(joined, suffix)
    if longer > length:
        ends, length, source = others, longer, joined
    expected = voted(source, ends, min(max_drafts, max(1, length)), least_share) if length else []
    assert propose(by, tokens, max_drafts) == expected


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 24))
def test_the_longest_end_is_found_wherever_it_is(tokens: list[int], repeats: int, longest: int) -> None:
    """And its length, which decides the number of drafts."""
    text = tokens * repeats
    suffix = text[-longest:]
    ends, length = occurrences(array(text[:-1]), array(suffix))
    assert (ends.tolist(), length) == longest_match(text[:-1], suffix)
