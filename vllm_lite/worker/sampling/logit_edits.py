"""What a step changes in its logits before tokens are drawn: lists of (row, token id) pairs, for all rows at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.worker.sampling.token_counts import Counted

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


class Held:
    """Arrays that are the same for many steps: they are brought to the logits' device once."""

    __slots__ = ("_arrays", "_tensors")

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        self._tensors: tuple[torch.Tensor, ...] | None = None

    def on(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._tensors is None:
            self._tensors = _on(logits, *self._arrays)
        return self._tensors


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes in the order of the fields. What is minus infinity before one of them stays so, and what is not a number.

    allowed     samples [n], and what is added to all their logits: 0 or minus infinity, float32 [n, vocab]
    bias        samples, token ids, and what is added: [num_pairs] each
    penalties   a positive logit is divided by `repetition`, a negative one multiplied; then `deduction` is subtracted
    """

    allowed: Held | None = None
    bias: Held | None = None
    penalties: Penalties | None = None

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        if self.allowed is not None:
            logits.index_add_(0, *self.allowed.on(logits))
        if self.bias is not None:
            samples, ids, values = self.bias.on(logits)
            logits[samples, ids] += values
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
