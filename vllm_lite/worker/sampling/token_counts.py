"""How often penalised sequences hold each token. Kept up as they grow, so that a step costs what they have of different
tokens, whatever the size of the vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Counted(NamedTuple):
    """The different tokens of some sequences, those of one side by side."""

    owners: NDArray[np.int64]  # [num_pairs], which of the sequences asked for
    ids: NDArray[np.int64]  # [num_pairs]
    counts: NDArray[np.int32]  # [num_pairs], how often it was generated


class TokenCounts:
    """One slot per sequence. All slots together are large, but a page of them that nobody writes takes no memory."""

    def __init__(self, num_slots: int, vocab_size: int, max_tokens: int) -> None:
        width = min(vocab_size, max_tokens)
        self._ids = np.zeros((num_slots, width), np.int32)  # in the order of their first coming
        self._counts = np.zeros((num_slots, width), np.int32)
        self._lengths = np.zeros(num_slots, np.int64)  # how many different tokens there are
        self._places = np.zeros((num_slots, vocab_size), np.int32)  # of each token in `_ids`, from 1; 0 = it is not

    def start(self, slot: int, tokens: NDArray[Any], num_uncounted: int) -> None:
        """The slot, which is clear, gets a sequence's tokens. The first `num_uncounted` are there, but do not count."""
        ids, inverse = np.unique(tokens, return_inverse=True)
        count = len(ids)
        self._ids[slot, :count] = ids
        self._counts[slot, :count] = np.bincount(inverse[num_uncounted:], minlength=count)
        self._lengths[slot] = count
        self._places[slot, ids] = np.arange(1, count + 1)

    def clear(self, slot: int) -> None:
        self._places[slot, self._ids[slot, : self._lengths[slot]]] = 0
        self._lengths[slot] = 0

    def add(
        self,
        slots: NDArray[np.int64],  # [n], all different
        tokens: NDArray[np.int64],  # [n]
    ) -> None:
        """Each sequence has generated one more token."""
        places = self._places[slots, tokens]
        (new,) = np.nonzero(places == 0)
        if len(new):
            new_slots, new_tokens = slots[new], tokens[new]
            ends = self._lengths[new_slots]
            self._ids[new_slots, ends] = new_tokens
            self._counts[new_slots, ends] = 0
            self._lengths[new_slots] = ends + 1
            self._places[new_slots, new_tokens] = places[new] = ends + 1
        self._counts[slots, places - 1] += 1

    def of(self, slots: NDArray[np.int64]) -> Counted:  # [n]
        lengths = self._lengths[slots]
        width = int(lengths.max(initial=0))
        held = np.arange(width) < lengths[:, None]
        owners = np.repeat(np.arange(len(slots)), lengths)
        return Counted(owners, self._ids[slots, :width][held].astype(np.int64), self._counts[slots, :width][held])
