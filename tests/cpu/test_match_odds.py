"""Odds of copied drafts by the length of their match, and the drafts that are proposed by them."""

from typing import Any

import numpy as np
import pytest

from vllm_lite.protocol.step import SureDrafts
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafter, NgramDrafter
from vllm_lite.worker.sampling.match_odds import MatchOdds
from vllm_lite.worker.sampling.suffix import SuffixDrafter

REPEATED = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]


def reported(odds: MatchOdds, length: int, *, is_right: bool, handle: int = 0) -> None:
    odds.report(handle, 2, 7, length)
    odds.learn(handle, np.array([5, 6, 7 if is_right else 8], np.int32))


def test_longer_matches_are_surer_until_their_drafts_say_otherwise() -> None:
    odds = MatchOdds()
    first = [odds.of(length) for length in range(1, 30)]
    assert first == sorted(first)
    assert 0.3 < first[0] < 0.5 < first[3] < 0.9 < first[-1] < 1.0
    for _ in range(100):
        reported(odds, 1, is_right=True)
        reported(odds, 9, is_right=False)
    assert odds.of(1) > 0.9
    assert odds.of(8) == odds.of(11) < 0.1
    assert odds.of(12) == first[11], "of such matches nothing was learned"


def test_a_draft_is_compared_once_and_only_with_its_own_sequence() -> None:
    odds = MatchOdds()
    first = odds.of(4)
    odds.report(0, 3, 7, 4)
    odds.learn(0, np.array([5, 6, 9], np.int32))  # the next token is not there: another step failed
    assert odds.of(4) == first
    odds.report(0, 3, 7, 4)
    odds.forget(0)
    odds.learn(0, np.array([5, 6, 9, 7], np.int32))
    assert odds.of(4) == first
    reported(odds, 4, is_right=True)
    once = odds.of(4)
    odds.learn(0, np.array([5, 6, 7], np.int32))
    assert odds.of(4) == once > first


def test_as_many_as_are_all_right_with_the_chance_asked_for() -> None:
    odds = MatchOdds()
    assert odds.most(1, 8, 0.0)[0] == 8
    assert odds.most(1, 8, 0.9) == (0, 0.0)
    found = [odds.most(24, 8, least)[0] for least in (0.95, 0.9, 0.7, 0.5, 0.1)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 8
    chance = odds.of(6) * odds.of(7)
    assert odds.most(6, 8, chance)[0] == 2
    assert odds.most(6, 8, chance)[1] == pytest.approx(odds.of(6) - chance)
    assert odds.most(6, 8, chance + 1e-9)[0] == 1


@pytest.mark.parametrize("make", [SuffixDrafter, NgramDrafter])
def test_drafters_propose_what_is_sure_enough_and_learn_from_the_rest(make: Any) -> None:
    by: Drafter = make(Speculation(method="suffix" if make is SuffixDrafter else "ngram"))

    def propose(tokens: list[int], least: float, gain: float = 0.0, handle: int = 0) -> list[int]:
        batch = DraftBatch(
            [handle], [np.array(tokens, np.int32)], [4], [None], [b"group"], price=SureDrafts(least, gain)
        )
        (drafts,) = by.before(batch)
        found: list[int] = drafts.tolist()
        return found

    whole = propose(REPEATED, 0.0)
    assert whole[:3] == [4, 5, 6]
    assert propose(REPEATED, 0.5) == whole[:1]
    assert propose(REPEATED, 0.9) == []
    tokens = list(REPEATED)
    for _ in range(40):  # three tokens match, and the next one is right
        assert propose(tokens, 0.99) == []
        propose([*tokens, 4], 0.99)
    assert propose(REPEATED, 0.9)[:1] == [4]


@pytest.mark.parametrize("make", [SuffixDrafter, NgramDrafter])
def test_drafts_are_dropped_if_together_they_gain_less_than_verifying_costs(make: Any) -> None:
    by: Drafter = make(Speculation(method="suffix" if make is SuffixDrafter else "ngram"))
    tokens = [np.array(tokens, np.int32) for tokens in (REPEATED, [9, 8, 7], REPEATED)]

    def propose(chosen: list[int], price: SureDrafts) -> list[int]:
        count = len(chosen)
        own = [tokens[index] for index in chosen]
        batch = DraftBatch(chosen, own, [4] * count, [None] * count, [b""] * count, price=price)
        return [len(drafts) for drafts in by.before(batch)]

    odds = MatchOdds()
    (_, one), both = odds.most(3, 4, 0.3), SureDrafts(0.3, 0.0)
    counts = propose([0, 1, 2], both)
    assert counts[0] == counts[2] > 0 == counts[1]
    assert propose([0, 1, 2], SureDrafts(0.3, 1.9 * one)) == counts
    assert propose([0, 1, 2], SureDrafts(0.3, 2.1 * one)) == [0, 0, 0]
    assert propose([0], SureDrafts(0.3, 1.1 * one)) == [0]
