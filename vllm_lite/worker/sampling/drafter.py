"""Speculation in the worker: draft the tokens that follow, and keep those that the model samples itself.

Why the tokens are the same as without: the model samples at every drafted position with that position's own parameters
and noise, and a sampled token counts only if every draft before it was right, so that it comes from logits of the true
sequence. What was computed behind a wrong draft is beyond the sequence's computed length and is overwritten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.checkpoint.model_spec import LayerSpec
from vllm_lite.protocol.step import Handle
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.sampling.masks import SequenceMask
from vllm_lite.worker.step_parts.rules import Rules

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
KVViews = Sequence[torch.Tensor]
Drafted = Int32s | torch.Tensor
"""Token ids, on the host or (int64) on the device: [num_drafts]."""

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
    groups: list[bytes] | None = None  # of each, the requests that may share answers; None: there are no groups
    states: list[int] | None = None  # of each, the slot of its state, which lacks its last token; None: there are none

    def some(self, chosen: Sequence[int]) -> "DraftBatch":
        """The sequences at these places of the batch."""
        return DraftBatch(
            [self.handles[index] for index in chosen],
            [self.tokens[index] for index in chosen],
            [self.max_drafts[index] for index in chosen],
            [self.masks[index] for index in chosen],
            None if self.groups is None else [self.groups[index] for index in chosen],
            None if self.states is None else [self.states[index] for index in chosen],
        )


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """Names the sequences that got tokens in one step, for the half of a drafter that follows it."""

    handles: list[Handle]
    lengths: Int64s  # [n], tokens of each, the new ones included
    tokens: Int64s  # [n], the last one of each
    hidden: torch.Tensor | None  # [n, hidden_size], what this token was drawn from; None unless `reads_hidden`


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Has the hidden states of all tokens of a step."""

    inputs: StepInputs
    hidden: torch.Tensor | None  # [num_tokens, hidden_size]; None where a part that scores prompts reads some of them
    num_kept: Int64s  # [num_seqs], how many of the tokens of each sequence are its own, and no refused drafts


class Drafter:
    """Proposes the tokens that follow, in two halves; a kind of drafter overrides those that it has.

    `before` runs on the host, before the forward pass, and says what is drafted. `after` runs behind it on the device,
    with its hidden states and tokens, to prepare what the next `before` says. That may stay on the device.
    """

    kv_layers: tuple[LayerSpec, ...] = ()
    """Layers that keep KV for the drafter, in blocks of the sequence's own tables: they are layers of the KV cache
    behind the model's."""
    follows = False
    """Whether there is `after`."""
    reads_hidden = False
    """Whether it gets hidden states there."""

    reads_all = False
    """Whether there is `computed`."""
    forced: Mapping[Handle, int] = MappingProxyType({})
    """How many of the latest drafts of a sequence, the first ones, its grammar leaves no choice about."""

    def load(self, place: DraftPlace) -> None:
        """Load what is the drafter's own, beside the model, which is loaded. Raises ModelError or ConfigError."""

    def begin(self, own: KVViews, of_model: KVViews) -> None:
        """The KV cache is there. own: per layer of `kv_layers` [num_blocks, 2, num_kv_heads, block_size, head_size];
        of_model: the same of the model's layers, whose KV a drafter may read."""

    def attach(self, rows: Rows, rules: Rules) -> None:
        """The batch is there. Called behind `begin`."""

    def run_largest(self, own: KVViews, of_model: KVViews) -> None:
        """Run what takes the most memory, as the memory profile does with the model. The caches: as in `begin`, with
        the null block alone."""

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Blocks of the KV cache are moved by this program, before all else of a step."""

    def begin_step(self) -> None:
        """The rows are those of a step that is about to be made: whatever it writes is known, but for drafts."""

    def opened(self, handle: Handle, parent: Handle | None) -> None:
        """A sequence begins; `parent`: the one whose tokens and KV it has, if it is a fork."""

    def computed(self, step: ComputedStep) -> None:
        """A step has been run, and its tokens are about to count. Called once a step, before `after`."""

    def rehearse(self, step: StepInputs) -> None:
        """Do what a model's pass takes that makes one draft of each sequence, on a step that touches no KV: to time it.
        Drafts without a model take next to nothing."""

    def before(self, batch: DraftBatch) -> Sequence[Drafted]:
        """Return each sequence's drafts, in the order of the batch: at most `max_drafts`, or none. Called once a step
        in which a sequence takes drafts."""
        return [NO_TOKENS] * len(batch.handles)

    def after(self, step: DrawnStep) -> None:
        """A step has been run, and these sequences got tokens. Called once a step."""

    def ended(self, group: bytes, answer: Int32s) -> None:
        """A sequence has ended with these output tokens: [num_tokens]. They may be drafted for others of its group, if
        it is not empty."""


class GrammarDrafter(Drafter):
    """Drafts what the sequences' grammars force, then what another drafter says, as far as the grammars allow it.

    Where a grammar allows one token only, that token is certain. It is verified like all drafts: a wrong one would cost
    time, and change no token.
    """

    def __init__(self, other: Drafter | None = None, *, forces: bool = True) -> None:
        """`forces`: whether forced tokens are drafted."""
        self.other = other
        self._forces = forces
        self.with_model = other or Drafter()
        self.kv_layers, self.reads_hidden = self.with_model.kv_layers, self.with_model.reads_hidden
        self.reads_all = self.with_model.reads_all
        self.follows = self.with_model.follows or self.reads_hidden

    def load(self, place: DraftPlace) -> None:
        self.with_model.load(place)

    def begin(self, own: KVViews, of_model: KVViews) -> None:
        self.with_model.begin(own, of_model)

    def attach(self, rows: Rows, rules: Rules) -> None:
        self.with_model.attach(rows, rules)

    def run_largest(self, own: KVViews, of_model: KVViews) -> None:
        self.with_model.run_largest(own, of_model)

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        self.with_model.moves(block_ops)

    def begin_step(self) -> None:
        self.with_model.begin_step()

    def opened(self, handle: Handle, parent: Handle | None) -> None:
        self.with_model.opened(handle, parent)

    def computed(self, step: ComputedStep) -> None:
        self.with_model.computed(step)

    def rehearse(self, step: StepInputs) -> None:
        self.with_model.rehearse(step)

    def after(self, step: DrawnStep) -> None:
        self.with_model.after(step)

    def ended(self, group: bytes, answer: Int32s) -> None:
        self.with_model.ended(group, answer)

    def before(self, batch: DraftBatch) -> Sequence[Drafted]:
        """As Drafter.before. What is on the device stays there where there is no grammar."""
        known, most, masks = batch.tokens, batch.max_drafts, batch.masks
        forced = [NO_TOKENS] * len(known)
        if self._forces:
            forced = [_forced(*each) for each in zip(known, most, masks, strict=True)]
        self.forced = {handle: len(own) for handle, own in zip(batch.handles, forced, strict=True) if len(own)}
        if self.other is None:
            return forced
        others: list[Drafted] = [NO_TOKENS] * len(known)
        rest = [index for index, tokens in enumerate(forced) if len(tokens) < most[index]]
        if rest:
            others_of_rest = self.other.before(_behind(batch, forced, rest))
            for index, drafted in zip(rest, others_of_rest, strict=True):
                others[index] = drafted
        return [_allowed(*each) for each in zip(known, most, masks, forced, others, strict=True)]


def _behind(batch: DraftBatch, forced: Sequence[Int32s], rest: Sequence[int]) -> DraftBatch:
    """The sequences `rest` of the batch, with their forced tokens as if these were theirs."""
    return replace(
        batch.some(rest),
        tokens=[np.concatenate((batch.tokens[i], forced[i])) if len(forced[i]) else batch.tokens[i] for i in rest],
        max_drafts=[batch.max_drafts[index] - len(forced[index]) for index in rest],
    )


def _forced(tokens: Int32s, max_drafts: int, mask: SequenceMask | None) -> Int32s:  # [at most max_drafts]
    return NO_TOKENS if mask is None else np.array(mask.forced(tokens)[:max_drafts], np.int32)


def _allowed(
    tokens: Int32s, max_drafts: int, mask: SequenceMask | None, forced: Int32s, others: Drafted
) -> Drafted:  # [at most max_drafts]
    """Join the drafts of both kinds, as far as they may follow the tokens."""
    if mask is None:
        return others
    others = on_host(others)
    drafts = np.concatenate((forced, others))[:max_drafts] if len(forced) else others
    return drafts[: mask.num_valid(tokens, drafts)]


class NgramDrafter(Drafter):
    """Drafts that what followed the last few tokens before will follow them again."""

    def __init__(self, config: Speculation) -> None:
        self.longest = config.prompt_lookup_max
        self.shortest = config.prompt_lookup_min

    def before(self, batch: DraftBatch) -> list[Int32s]:
        """As Drafter.before."""
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


def on_host(drafted: Drafted) -> Int32s:
    """Bring drafts to the host, if they are not there."""
    return drafted.numpy(force=True).astype(np.int32) if isinstance(drafted, torch.Tensor) else drafted


def num_proved(
    sampled: NDArray[np.int64],  # [num_samples]
    drafts: NDArray[np.int64],  # [num_samples], the draft for the same position; NO_DRAFT at the last of each sequence
    starts: NDArray[np.int64],  # [num_seqs], of each sequence's samples; every sequence has one
) -> NDArray[np.int64]:  # [num_seqs]
    """Count the samples of each sequence that are its tokens: up to and with the first that was not drafted."""
    surprises = np.flatnonzero(sampled != drafts)
    return surprises[np.searchsorted(surprises, starts)] - starts + 1
