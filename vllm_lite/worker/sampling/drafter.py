"""Speculation in the worker: draft the tokens that follow, and keep those that the model samples itself.

Why the tokens are the same as without: the model samples at every drafted position with that position's own parameters
and noise, and a sampled token counts only if every draft before it was right, so that it comes from logits of the true
sequence. What was computed behind a wrong draft is beyond the sequence's computed length and is overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.step import Handle
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.sampling.masks import SequenceMask

Int32s = NDArray[np.int32]

NO_DRAFT = -1
"""Equals no token: stands where nothing was drafted."""
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Names the sequences that take drafts in one step; each lacks only its last token's KV."""

    handles: list[Handle]
    tokens: list[Int32s]  # of each: [num_tokens], views of the persistent batch
    max_drafts: list[int]  # of each, at least 1
    masks: list[SequenceMask | None]  # of each, None if it follows no grammar


class Drafter(Protocol):
    """Proposes the tokens that follow. It is called once a step, before the forward pass."""

    def propose(self, batch: DraftBatch) -> Sequence[Int32s]:
        """Return each sequence's drafts, in the order of the batch: at most `max_drafts`, or none."""
        ...


class GrammarDrafter:
    """Drafts what the sequences' grammars force, then what another drafter says, as far as the grammars allow it.

    Where a grammar allows one token only, that token is certain. It is verified like all drafts: a wrong one would cost
    time, and change no token.
    """

    def __init__(self, other: Drafter | None = None, *, forces: bool = True) -> None:
        """`forces`: whether forced tokens are drafted."""
        self._other = other
        self._forces = forces

    def propose(self, batch: DraftBatch) -> list[Int32s]:
        """As Drafter.propose."""
        known, most, masks = batch.tokens, batch.max_drafts, batch.masks
        forced = [NO_TOKENS] * len(known)
        if self._forces:
            forced = [_forced(*each) for each in zip(known, most, masks, strict=True)]
        if self._other is None:
            return forced
        further = [np.concatenate(pair) if len(pair[1]) else pair[0] for pair in zip(known, forced, strict=True)]
        others = self._other.propose(replace(batch, tokens=further))
        return [_allowed(*each) for each in zip(known, most, masks, forced, others, strict=True)]


def _forced(tokens: Int32s, max_drafts: int, mask: SequenceMask | None) -> Int32s:  # [at most max_drafts]
    return NO_TOKENS if mask is None else np.array(mask.forced(tokens)[:max_drafts], np.int32)


def _allowed(
    tokens: Int32s, max_drafts: int, mask: SequenceMask | None, forced: Int32s, others: Int32s
) -> Int32s:  # [at most max_drafts]
    """Join the drafts of both kinds, as far as they may follow the tokens."""
    drafts = np.concatenate((forced, others))[:max_drafts] if len(forced) else others
    return drafts if mask is None else drafts[: mask.num_valid(tokens, drafts)]


class NgramDrafter:
    """Drafts that what followed the last few tokens before will follow them again."""

    def __init__(self, config: Speculation) -> None:
        self.longest = config.prompt_lookup_max
        self.shortest = config.prompt_lookup_min

    def propose(self, batch: DraftBatch) -> list[Int32s]:
        """As Drafter.propose."""
        return [self._follow(*pair) for pair in zip(batch.tokens, batch.max_drafts, strict=True)]

    def _follow(
        self,
        tokens: Int32s,  # [num_tokens]
        max_drafts: int,
    ) -> Int32s:  # [max_drafts], or [0] if nothing is found
        """Return what followed the most recent occurrence of the longest suffix that occurs before.

        Where the occurrence ends so close to the end that too little follows, the draft goes on with itself: a
        sequence that repeats p tokens is drafted to repeat them for ever.
        """
        # Where matches of the last token end; the loop narrows them to those of the last two, three ...
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1
        while length < self.longest and len(ends):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[len(tokens) - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < self.shortest:
            return tokens[:0]
        return np.resize(tokens[ends[-1] + 1 :][:max_drafts], max_drafts)


def num_kept(
    sampled: NDArray[np.int64],  # [num_samples]
    drafts: NDArray[np.int64],  # [num_samples], the draft for the same position; NO_DRAFT at the last of each sequence
    starts: NDArray[np.int64],  # [num_seqs], of each sequence's samples; every sequence has one
) -> NDArray[np.int64]:  # [num_seqs]
    """Count the samples of each sequence that are its tokens: up to and with the first that was not drafted."""
    surprises = np.flatnonzero(sampled != drafts)
    return surprises[np.searchsorted(surprises, starts)] - starts + 1
