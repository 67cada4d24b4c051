"""Presence, frequency and repetition penalties: their arithmetic, and the token counts of each sequence.

A positive logit of a token that the sequence holds is divided by the repetition penalty, a negative one multiplied by
it. Then the frequency penalty is subtracted once for each time that the token was generated, and the presence penalty
once if it was generated at all. Counts are updated as sequences grow, so that the cost of a step depends on the number
of different tokens, not on the size of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalises the logits of a step's samples, for each (sample, different token) pair."""

    samples: Int64s  # [num_pairs]
    ids: Int64s  # [num_pairs]
    repetition: Float32s  # [num_pairs]
    deduction: Float32s  # [num_pairs], the presence and the frequency penalty

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        arrays = (self.samples, self.ids, self.repetition, self.deduction)
        samples, ids, repetition, deduction = (torch.from_numpy(array).to(logits.device) for array in arrays)
        before = logits[samples, ids]
        logits[samples, ids] = torch.where(before > 0, before / repetition, before * repetition) - deduction


class TokenCounts:
    """Token counts of each penalised sequence that has a row, one entry per sequence. The arrays are large, but pages
    that are never written take no memory."""

    def __init__(self, num_entries: int, vocab_size: int, max_tokens: int) -> None:
        width = min(vocab_size, max_tokens)
        self._ids = np.zeros((num_entries, width), np.int32)  # in the order in which they first occurred
        self._counts = np.zeros((num_entries, width), np.int32)
        self._lengths = np.zeros(num_entries, np.int64)  # how many different tokens there are
        self._columns = np.zeros((num_entries, vocab_size), np.int32)  # of each token in `_ids`, from 1; 0 = absent

    def start(self, entry: int, tokens: NDArray[Any], num_uncounted: int) -> None:
        """Fill an empty entry with a sequence's tokens. The first `num_uncounted` are held, but were not generated."""
        ids, inverse = np.unique(tokens, return_inverse=True)
        count = len(ids)
        self._ids[entry, :count] = ids
        self._counts[entry, :count] = np.bincount(inverse[num_uncounted:], minlength=count)
        self._lengths[entry] = count
        self._columns[entry, ids] = np.arange(1, count + 1)

    def clear(self, entry: int) -> None:
        self._columns[entry, self._ids[entry, : self._lengths[entry]]] = 0
        self._lengths[entry] = 0

    def add(
        self,
        entries: Int64s,  # [n], all different
        tokens: Int64s,  # [n]
    ) -> None:
        """Count one more generated token of each sequence."""
        columns = self._columns[entries, tokens]
        (new,) = np.nonzero(columns == 0)
        if len(new):
            new_entries, new_tokens = entries[new], tokens[new]
            ends = self._lengths[new_entries]
            self._ids[new_entries, ends] = new_tokens
            self._counts[new_entries, ends] = 0
            self._lengths[new_entries] = ends + 1
            self._columns[new_entries, new_tokens] = columns[new] = ends + 1
        self._counts[entries, columns - 1] += 1

    def of(self, entries: Int64s) -> tuple[Int64s, Int64s, NDArray[np.int32]]:
        """The different tokens of some sequences, grouped by sequence: (index in `entries`, token id, number of times
        generated), [num_pairs] each."""
        lengths = self._lengths[entries]
        width = int(lengths.max(initial=0))
        held = np.arange(width) < lengths[:, None]
        owners = np.repeat(np.arange(len(entries)), lengths)
        return owners, self._ids[entries, :width][held].astype(np.int64), self._counts[entries, :width][held]

    def penalties(
        self,
        entries: Int64s,  # [n]
        samples: Int64s,  # [n], the rows of logits of these sequences
        weights: Float32s,  # [3, n]: presence, frequency and repetition penalty
    ) -> Penalties:
        owners, ids, counts = self.of(entries)
        presence, frequency, repetition = weights
        deduction = frequency[owners] * counts.astype(np.float32) + presence[owners] * (counts > 0)
        return Penalties(samples[owners], ids, repetition[owners], deduction)
