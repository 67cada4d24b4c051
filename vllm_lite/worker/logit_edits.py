"""What a step changes in its logits before tokens are drawn: lists of (row, token id) pairs, for all rows at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.worker.token_counts import Counted

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Samples and token ids, both [num_pairs]; no pair occurs twice."""
Float32s = NDArray[np.float32]

NEVER = -float("inf")


@dataclass(frozen=True, slots=True)
class Penalties:
    """For every different token of the penalised samples."""

    pairs: Pairs
    repetition: Float32s  # [num_pairs]
    deduction: Float32s  # [num_pairs]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes in the order of the fields. What is minus infinity before one of them stays so.

    allowed     the only tokens of their samples
    bias        added
    penalties   a positive logit is divided by `repetition`, a negative one multiplied; then `deduction` is subtracted
    """

    allowed: Pairs | None = None
    bias: tuple[Pairs, Float32s] | None = None
    penalties: Penalties | None = None

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        if self.allowed is not None:
            pairs = _on(logits, *self.allowed)
            kept = logits[pairs]
            logits[_on(logits, np.unique(self.allowed[0]))] = NEVER
            logits[pairs] = kept
        if self.bias is not None:
            pairs = _on(logits, *self.bias[0])
            logits[pairs] += _on(logits, self.bias[1])[0]
        if self.penalties is not None:
            pairs = _on(logits, *self.penalties.pairs)
            repetition, deduction = _on(logits, self.penalties.repetition, self.penalties.deduction)
            before = logits[pairs]
            logits[pairs] = torch.where(before > 0, before / repetition, before * repetition) - deduction


def penalties(
    counted: Counted,  # of n samples
    samples: NDArray[np.int64],  # [n], the rows of logits that they have
    presence: Float32s,  # [n]
    frequency: Float32s,  # [n]
    repetition: Float32s,  # [n]
) -> Penalties:
    owners, ids, counts = counted
    generated = counts > 0
    deduction = frequency[owners] * counts.astype(np.float32) + presence[owners] * generated
    return Penalties((samples[owners], ids), repetition[owners], deduction)


def _on(logits: torch.Tensor, *arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array).to(logits.device) for array in arrays)
