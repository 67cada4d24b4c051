"""The masks of one step, filled by threads while the model computes its logits.

A mask depends only on tokens that are known before the forward pass. So filling starts with the step, and apply() waits
until it is complete. Sources release the GIL most of the time.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from vllm_lite.structured.sources.source import ALL_BITS
from vllm_lite.worker.sampling.masks import Int32s, Int64s, SequenceMask, TokenMasks, Uint32s, bitmask_of

MAX_THREADS = 4
MIN_SEQUENCES = 32
"""Minimum sequences per thread: on a CPU a thread takes its core from the kernels. (Two cores, 32 rows: a step of
10.1 ms took 12.3 ms with four threads and 11.2 ms with one.)"""
PATIENCE_S = 60.0
"""Maximum seconds to wait for a mask; the limits on grammars bound each at some milliseconds."""


class Masked(NamedTuple):
    """Samples of one sequence with a mask: `num_samples` samples from `first` on."""

    first: int
    num_samples: int
    mask: SequenceMask


class StepMasks:
    """The masks of a step that are being filled."""

    def __init__(self, samples: Int64s, bitmasks: Uint32s, filling: list[Future[None]]) -> None:
        self._samples = samples  # [n]
        self._bitmasks = bitmasks  # [n, words]
        self._filling = filling

    def bitmasks(self) -> Uint32s:
        """Wait until all masks are filled, and return them. Raises a source's unexpected error."""
        for part in self._filling:
            part.result(PATIENCE_S)
        self._filling = []
        return self._bitmasks

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        TokenMasks(self._samples, self.bitmasks()).apply(logits)

    def leave_only(self, samples: Int64s, tokens: Int64s, vocab_size: int) -> Int64s:  # [n], [n] -> [m], sorted
        """Find those of `samples` whose masks allow only the tokens paired with them in `tokens`."""
        bitmasks, found = self.bitmasks(), []
        for sample in np.intersect1d(samples, self._samples).tolist():
            others = ~bitmask_of(tokens[samples == sample], vocab_size)
            if not (bitmasks[np.flatnonzero(self._samples == sample)[0]] & others).any():
                found.append(sample)
        return np.array(found, np.int64)


def masks_of_drafts(masked: Sequence[Masked], known: Sequence[tuple[Int32s, Int32s]], vocab_size: int) -> StepMasks:
    """Masks of the tokens that may follow drafts, filled immediately. `known`: (tokens of the sequence, drafts), per
    sample."""
    samples = np.array([each.first for each in masked], np.int64)
    bitmasks = np.full((len(masked), -(-vocab_size // 32)), ALL_BITS, np.uint32)
    for each, bitmask in zip(masked, bitmasks, strict=True):
        each.mask.fill_behind(*known[each.first], bitmask)
    return StepMasks(samples, bitmasks, [])


class MaskFiller:
    """Fills the masks of one step after the other, in reused memory."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._kept = np.zeros((0, self._words), np.uint32)
        self._threads: ThreadPoolExecutor | None = None

    def begin(
        self,
        masked: list[Masked],
        positions: Int64s,  # [num_samples], index in its sequence of the token about to be sampled
        rows: Int64s,  # [num_samples]
        token_ids: Int32s,  # [max_rows, max_tokens]; it does not change until the masks are there
    ) -> StepMasks:
        """Begin to fill the masks of a step. The masks of the previous step must have been applied."""
        samples = np.concatenate([np.arange(first, first + count) for first, count, _ in masked])
        if len(self._kept) < len(samples):
            self._kept = np.empty((2 * len(samples), self._words), np.uint32)
        bitmasks = self._kept[: len(samples)]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="masks")
        work, start = [], 0
        for first, count, mask in masked:
            tokens = token_ids[rows[first], : positions[first + count - 1]]
            work.append((mask, tokens, bitmasks[start : start + count]))
            start += count
        share = max(MIN_SEQUENCES, -(-len(work) // MAX_THREADS))
        filling = [self._threads.submit(_fill, work[at : at + share]) for at in range(0, len(work), share)]
        return StepMasks(samples, bitmasks, filling)


def _fill(work: list[tuple[SequenceMask, Int32s, Uint32s]]) -> None:
    for mask, tokens, bitmasks in work:
        bitmasks[:] = ALL_BITS
        mask.fill(tokens, bitmasks)
