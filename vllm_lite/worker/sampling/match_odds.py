"""The chance that a copied draft is right: the longer the match that it follows, the surer it is.

A drafter without a model reports each draft that it would make, also those that it does not propose. Once the sequence
has its next token, it is known whether the draft was right, at no cost but the comparison.
"""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.step import Handle

LENGTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24
"""Lower bounds of the lengths of matches that are taken to be equally sure."""
DECAY = 0.98
"""Weight of a draft's predecessor, of matches of about the same length."""
PRIOR = 6.0
"""Number of drafts that the chance assumed at first counts for."""


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

    def most(self, length: int, count: int, least: float) -> int:
        """Number of drafts, at most `count`, that are all right with a chance of `least` or more. Each right one makes
        the match longer."""
        if least <= 0:
            return count
        odds = 1.0
        for number in range(count):
            odds *= self.of(length + number)
            if odds < least:
                return number
        return count

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


def _place(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1
