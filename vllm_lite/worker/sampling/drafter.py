"""Speculation in the worker: draft next tokens, and accept those that the model samples itself.

The output is the same as without drafts: the model samples at every drafted position with that position's own
parameters and noise, and a sampled token counts only if all drafts before it were accepted, so that its logits are
those of the true sequence. KV after a rejected draft is beyond the sequence's computed length and is overwritten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.checkpoint.model_spec import LayerSpec
from vllm_lite.protocol.step import Handle, SureDrafts
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.sampling.masks import SequenceMask
from vllm_lite.worker.sampling.match_odds import NOTHING_FOUND, MatchOdds, ScoredDrafts, paying
from vllm_lite.worker.step_parts.rules import Rules

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
KVViews = Sequence[torch.Tensor]
Drafted = Int32s | torch.Tensor
"""Token ids, on the host or (int64) on the device: [num_drafts]."""

NO_DRAFT = -1
"""Placeholder where nothing was drafted; equals no token id."""
NO_TOKENS = np.zeros(0, np.int32)
NO_PRICE = SureDrafts(0.0, 0.0)
"""The price with which all drafts are proposed."""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences that take drafts in one step; of each, only the last token's KV is missing."""

    handles: list[Handle]
    tokens: list[Int32s]  # of each: [num_tokens], views of the persistent batch
    max_drafts: list[int]  # of each, at least 1
    masks: list[SequenceMask | None]  # of each, None if it follows no grammar
    groups: list[bytes] | None = None  # of each, the group of requests that may share answers; None: no groups
    states: list[int] | None = None  # of each, the slot of its state before its last token; None: no recurrent layers
    price: SureDrafts = NO_PRICE  # of drafts, for drafters that know their odds

    def some(self, chosen: Sequence[int]) -> "DraftBatch":
        """Select the sequences at the indices `chosen` of the batch."""
        return DraftBatch(
            [self.handles[index] for index in chosen],
            [self.tokens[index] for index in chosen],
            [self.max_drafts[index] for index in chosen],
            [self.masks[index] for index in chosen],
            None if self.groups is None else [self.groups[index] for index in chosen],
            None if self.states is None else [self.states[index] for index in chosen],
            self.price,
        )


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The sequences that got tokens in one step, for `Drafter.after`."""

    handles: list[Handle]
    lengths: Int64s  # [n], tokens of each, including the new ones
    tokens: Int64s  # [n], the last token of each
    hidden: torch.Tensor | None  # [n, hidden_size], from which this token was sampled; None unless `reads_hidden`


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The hidden states of all tokens of a step, for `Drafter.computed`."""

    inputs: StepInputs
    hidden: torch.Tensor | None  # [num_tokens, hidden_size]; None if a part that scores prompts reads some of them
    num_kept: Int64s  # [num_seqs], tokens of each sequence without rejected drafts


class Drafter:
    """Drafts next tokens, in two halves; a subclass overrides the ones that it has.

    `before` runs on the host before the forward pass, and returns the drafts. `after` runs on the device after the
    forward pass, with its hidden states and tokens, to prepare the next drafts, which may stay on the device.
    """

    kv_layers: tuple[LayerSpec, ...] = ()
    """The drafter's own layers with KV, which follow the model's layers in the KV cache and use the sequences' block
    tables."""
    follows = False
    """Whether the drafter implements `after`."""
    reads_hidden = False
    """Whether `after` needs hidden states."""

    reads_all = False
    """Whether the drafter implements `computed`."""
    forced: Mapping[Handle, int] = MappingProxyType({})
    """Number of a sequence's latest drafts, from the first on, that its grammar forced."""

    def load(self, place: DraftPlace) -> None:
        """Load the drafter's own weights; the model is loaded already. Raises ModelError or ConfigError."""

    def begin(self, own: KVViews, of_model: KVViews) -> None:
        """Take the KV cache, once allocated. own: per layer of `kv_layers` [num_blocks, 2, num_kv_heads, block_size,
        head_size]; of_model: the same for the model's layers, whose KV a drafter may read."""

    def attach(self, rows: Rows, rules: Rules) -> None:
        """Take the persistent batch. Called after `begin`."""

    def run_largest(self, own: KVViews, of_model: KVViews) -> None:
        """Run the work with the largest memory use, for the memory profile. The caches are as in `begin`, with only the
        null block."""

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Handle moves of KV blocks, before all other work of a step."""

    def begin_step(self) -> None:
        """Called before the step's drafts are made, when the rows are those of the step."""

    def opened(self, handle: Handle, parent: Handle | None) -> None:
        """Handle the begin of a sequence; `parent`: the sequence whose tokens and KV it shares, if it is a fork."""

    def computed(self, step: ComputedStep) -> None:
        """Handle a step that has run, before its tokens are appended. Called once per step, before `after`."""

    def rehearse(self, step: StepInputs) -> None:
        """Run one drafting pass for each sequence, on a step that does not touch the KV, to time it. Nothing to
        do for drafters without a model."""

    def before(self, batch: DraftBatch) -> Sequence[Drafted]:
        """Return each sequence's drafts, in the order of the batch: up to `max_drafts`, or none. Called once per step
        in which a sequence takes drafts."""
        return [NO_TOKENS] * len(batch.handles)

    def after(self, step: DrawnStep) -> None:
        """Handle a step in which these sequences got tokens. Called once per step."""

    def ended(self, group: bytes, answer: Int32s) -> None:
        """Handle the end of a sequence with the output tokens `answer`: [num_tokens]. They may be drafted for others of
        its group, unless the group is empty."""


class GrammarDrafter(Drafter):
    """Drafts the tokens that the sequences' grammars force, then those of another drafter that the grammars allow.

    A token is forced if the grammar allows no other. It is verified like all drafts: a wrong one would cost time, but
    change no output.
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
        """See Drafter.before. Drafts on the device stay there for sequences without a grammar."""
        known, most, masks = batch.tokens, batch.max_drafts, batch.masks
        if self.other is not None and not any(mask is not None for mask in masks):
            self.forced = {}
            return self.other.before(batch)
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
    """Select the sequences `rest` of the batch, with their forced tokens appended."""
    return replace(
        batch.some(rest),
        tokens=[np.concatenate((batch.tokens[i], forced[i])) if len(forced[i]) else batch.tokens[i] for i in rest],
        max_drafts=[batch.max_drafts[index] - len(forced[index]) for index in rest],
        price=SureDrafts(batch.price.min_odds, 0.0) if any(map(len, forced)) else batch.price,
    )


def _forced(tokens: Int32s, max_drafts: int, mask: SequenceMask | None) -> Int32s:  # [at most max_drafts]
    return NO_TOKENS if mask is None else np.array(mask.forced(tokens)[:max_drafts], np.int32)


def _allowed(
    tokens: Int32s, max_drafts: int, mask: SequenceMask | None, forced: Int32s, others: Drafted
) -> Drafted:  # [at most max_drafts]
    """Join forced and other drafts, up to the first that the grammar does not allow after `tokens`."""
    if mask is None:
        return others
    others = on_host(others)
    drafts = np.concatenate((forced, others))[:max_drafts] if len(forced) else others
    return drafts[: mask.num_valid(tokens, drafts)]


class NgramDrafter(Drafter):
    """Drafts the tokens that followed the last few tokens at their previous occurrence (prompt lookup)."""

    def __init__(self, config: Speculation) -> None:
        self.longest = config.prompt_lookup_max
        self.shortest = config.prompt_lookup_min
        self.odds = MatchOdds()

    def opened(self, handle: Handle, parent: Handle | None) -> None:  # noqa: ARG002
        """See Drafter.opened."""
        self.odds.forget(handle)

    def before(self, batch: DraftBatch) -> list[Int32s]:
        """See Drafter.before."""
        each = zip(batch.handles, batch.tokens, batch.max_drafts, strict=True)
        return paying([self._follow(*own, batch.price) for own in each], batch.price)

    def _follow(
        self,
        handle: Handle,
        tokens: Int32s,  # [num_tokens]
        max_drafts: int,
        price: SureDrafts,
    ) -> ScoredDrafts:  # at most max_drafts
        """Return the tokens after the most recent earlier occurrence of the longest suffix that has one, as many as are
        worth their `price`, and the tokens that they bring beyond it.

        If too few tokens follow that occurrence, the draft continues from itself: a sequence that repeats p tokens is
        drafted to repeat them indefinitely.
        """
        # Ends of matches of the last token; the loop narrows them to matches of the last two, three ...
        (ends,) = (tokens[:-1] == tokens[-1]).nonzero()
        length = 1
        while length < self.longest and len(ends):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[len(tokens) - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        self.odds.learn(handle, tokens)
        if not len(ends) or length < self.shortest:
            return NOTHING_FOUND
        self.odds.report(handle, len(tokens), int(tokens[ends[-1] + 1]), length)
        count, gain = self.odds.most(length, max_drafts, price.min_odds)
        found = tokens[ends[-1] + 1 :][:count]
        return np.resize(found, count) if len(found) < count else found, gain


def on_host(drafted: Drafted) -> Int32s:
    """Copy drafts to the host, if they are on the device."""
    return drafted.numpy(force=True).astype(np.int32) if isinstance(drafted, torch.Tensor) else drafted


def num_proved(
    sampled: NDArray[np.int64],  # [num_samples]
    drafts: NDArray[np.int64],  # [num_samples], the draft for the same position; NO_DRAFT at the last of each sequence
    starts: NDArray[np.int64],  # [num_seqs], of each sequence's samples; every sequence has one
) -> NDArray[np.int64]:  # [num_seqs]
    """Count each sequence's samples that count as its tokens: up to and including the first that was not drafted."""
    (surprises,) = (sampled != drafts).nonzero()
    kept: Int64s = surprises[surprises.searchsorted(starts)] - starts + 1
    return kept
