"""The chance that a copied draft is right: the longer the match that it follows, the surer it is.

A drafter without a model reports each draft that it would make, also those that it does not propose. Once the sequence
has its next token, it is known whether the draft was right, at no cost but the comparison.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.step import Handle, SureDrafts

LENGTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24
"""Lower bounds of the lengths of matches that are taken to be equally sure."""
DECAY = 0.98
"""Factor by which each draft lowers the weight of earlier ones with matches of about the same length."""
PRIOR = 6.0
"""Weight, in drafts, of the chance that is assumed at the start."""

ScoredDrafts = tuple[NDArray[np.int32], float]
"""Drafts of a sequence, and the tokens that they are expected to bring beyond their price."""
NOTHING_FOUND: ScoredDrafts = np.zeros(0, np.int32), 0.0


class MatchOdds:
    """Learns the chance by lengths of matches, from all sequences."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(LENGTHS)
        self._right = [0.0] * len(LENGTHS)
        self._latest: dict[Handle, tuple[int, int, int]] = {}
        """The latest draft of each sequence: the number of tokens before it, its token, and its place in LENGTHS."""

    def of(self, length: int) -> float:
        """The chance of a draft behind a match of `length` tokens."""
        place = _place(length)
        first = (LENGTHS[place] + 0.5) / (LENGTHS[place] + 3)
        return (self._right[place] + PRIOR * first) / (self._counts[place] + PRIOR)

    def most(self, length: int, count: int, min_odds: float) -> tuple[int, float]:
        """Number of drafts, at most `count`, that are all right with a chance of `min_odds` or more, and the tokens
        that they are expected to bring beyond `min_odds` for each. Each right one makes the match longer."""
        odds, gain = 1.0, 0.0
        for number in range(count):
            odds *= self.of(length + number)
            if odds < min_odds:
                return number, gain
            gain += odds - min_odds
        return count, gain

    def report(self, handle: Handle, num_tokens: int, draft: int, length: int) -> None:
        """Remember the first draft behind the `num_tokens` tokens of a sequence, and the length of its match."""
        self._latest[handle] = num_tokens, draft, _place(length)

    def learn(self, handle: Handle, tokens: NDArray[np.int32]) -> None:
        """Compare the latest draft of a sequence with its `tokens`."""
        num_tokens, draft, place = self._latest.pop(handle, (len(tokens), 0, 0))
        if num_tokens < len(tokens):
            self._counts[place] = DECAY * self._counts[place] + 1.0
            self._right[place] = DECAY * self._right[place] + float(tokens[num_tokens] == draft)

    def forget(self, handle: Handle) -> None:
        """Forget the latest draft of a sequence whose handle another one has now."""
        self._latest.pop(handle, None)


def paying(found: Sequence[ScoredDrafts], price: SureDrafts) -> list[NDArray[np.int32]]:
    """Return the drafts of each sequence of a step, or no drafts at all if together they are expected to bring fewer
    tokens than their verification costs."""
    is_worth = sum(gain for _, gain in found) >= price.min_gain
    return [drafts if is_worth else NOTHING_FOUND[0] for drafts, _ in found]


def _place(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1
