"""Rules of sequences for their logits, and the edits of one step's logits that follow from them.

The order of the rules is vLLM's: allowed ids, masks, bad words, and stop ids before min_tokens rule tokens out; then
logit_bias is added; then penalties apply (penalties.py). Sequences without rules cost nothing. The others have an entry
in the RuleBook as long as they have a row. The constant part of a step's edits is computed once for as long as the same
sequences sample; the rest is computed for all of them at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.worker.sampling.masks import NEVER, MaskSourceOf, SequenceMask, TokenMasks, bitmask_of
from vllm_lite.worker.sampling.penalties import Float32s, Int64s, Penalties, TokenCounts
from vllm_lite.worker.sampling.step_masks import Masked, MaskFiller, StepMasks

Pairs = tuple[Int64s, Int64s]
"""Samples and token ids, both [num_pairs]."""

NO_RULES = LogitRules()
ANY_TOKEN = -1
ALWAYS = np.iinfo(np.int64).max

Part = TypeVar("Part")
Joined = TypeVar("Joined")


# ---- one step


class Bias:
    """Adds values to some logits. It is constant over many steps, so it is copied to the device once."""

    def __init__(self, samples: Int64s, ids: Int64s, values: Float32s) -> None:  # [num_pairs] each, no pair twice
        self._arrays = samples, ids, values
        self._tensors: list[torch.Tensor] = []

    def apply(self, logits: torch.Tensor) -> None:
        if not self._tensors:
            self._tensors = [torch.from_numpy(array).to(logits.device) for array in self._arrays]
        samples, ids, values = self._tensors
        logits[samples, ids] += values


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Edits the logits of one step, in the order of the fields.

    A logit of minus infinity stays so through every edit; a NaN stays so unless it is banned.
    """

    banned: Pairs | None = None
    """Logits set to minus infinity; a pair may occur twice."""
    allowed: TokenMasks | None = None
    masks: StepMasks | None = None
    ends: Pairs | None = None
    """Like `banned`, except in samples whose mask allows nothing else: a complete grammar overrides min_tokens."""
    bias: Bias | None = None
    penalties: Penalties | None = None

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        for banned in (self.banned, self._early_ends(logits.shape[1])):
            if banned is not None:
                logits[tuple(torch.from_numpy(array).to(logits.device) for array in banned)] = NEVER
        for change in (self.allowed, self.masks, self.bias, self.penalties):
            if change is not None:
                change.apply(logits)

    def _early_ends(self, vocab_size: int) -> Pairs | None:
        if self.ends is None or self.masks is None:
            return self.ends
        samples, tokens = self.ends
        kept = ~np.isin(samples, self.masks.leave_only(samples, tokens, vocab_size))
        return samples[kept], tokens[kept]


# ---- one sequence


@dataclass(frozen=True, slots=True)
class _Bans:
    """Tokens that must not come next: the last token of a bad word if the output ends with the rest of the word, and
    stop ids before min_tokens."""

    prefixes: NDArray[np.int32]  # [n, longest], the rest of each word, at the end of the row; before it ANY_TOKEN
    since: Int64s  # [n], the least position at which the token is banned: the output has room for the prefix
    until: Int64s  # [n], the position from which on it is allowed
    tokens: Int64s  # [n]


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """Rules of one sequence, None for each kind that it lacks. A preempted sequence keeps them; a fork has its own."""

    num_prompt: int
    allowed: NDArray[np.uint32] | None  # bitmask
    mask: SequenceMask | None
    bans: _Bans | None
    bias: tuple[Int64s, Float32s] | None  # token ids and values
    weights: tuple[float, float, float] | None  # presence, frequency and repetition penalty


def read_rules(
    sampling: Sampling, num_prompt: int, vocab_size: int, mask_source_of: MaskSourceOf | None
) -> SequenceRules | None:
    """Read the rules of a new sequence; None if it has none."""
    if not sampling.is_ruled:
        return None
    rules = sampling.rules or NO_RULES
    source = mask_source_of(sampling) if mask_source_of is not None else None
    ids, values = zip(*rules.bias, strict=True) if rules.bias else ((), ())
    weights = rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty
    return SequenceRules(
        num_prompt,
        allowed=bitmask_of(np.frombuffer(rules.allowed, "<u4"), vocab_size) if rules.allowed else None,
        mask=SequenceMask(source, num_prompt) if source is not None else None,
        bans=_read_bans(sampling, rules.bad_words, num_prompt, vocab_size),
        bias=(np.array(ids, np.int64), np.array(values, np.float32)) if ids else None,
        weights=weights if rules.penalises else None,
    )


def _read_bans(
    sampling: Sampling, bad_words: tuple[tuple[int, ...], ...], num_prompt: int, vocab_size: int
) -> _Bans | None:
    stops = [(token,) for token in sampling.stop_ids if token < vocab_size] if sampling.min_tokens_until else []
    words = [*stops, *bad_words]
    if not words:
        return None
    lengths = np.array([len(word) - 1 for word in words], np.int64)
    prefixes = np.full((len(words), lengths.max()), ANY_TOKEN, np.int32)
    for prefix, word in zip(prefixes, words, strict=True):
        prefix[len(prefix) - len(word) + 1 :] = word[:-1]
    until = np.array([sampling.min_tokens_until] * len(stops) + [ALWAYS] * len(bad_words), np.int64)
    return _Bans(prefixes, num_prompt + lengths, until, np.array([word[-1] for word in words], np.int64))


# ---- the sequences that have a row


@dataclass(frozen=True, slots=True)
class _Table:
    """Joined rules of a step's samples, reused as long as the same sequences sample."""

    entries: Int64s  # [num_samples]
    allowed: TokenMasks | None
    masks: list[Masked]
    bans: tuple[Int64s, _Bans] | None  # samples [n]
    bias: Bias | None
    penalised: tuple[Int64s, Float32s] | None  # samples [n], weights [3, n]


class RuleBook:
    """Rules of the sequences that have a row. Entry 0 is shared by all sequences without rules."""

    def __init__(self, max_num_seqs: int, vocab_size: int, max_tokens: int) -> None:
        self._sizes = max_num_seqs + 1, vocab_size, max_tokens
        self._free = list(range(max_num_seqs, 0, -1))
        self._used: dict[int, SequenceRules] = {}  # by entry
        self._penalised = np.zeros(max_num_seqs + 1, np.bool_)
        self._counts: TokenCounts | None = None  # made when the first sequence needs it
        self._table: _Table | None = None
        self._filler = MaskFiller(vocab_size)
        self.fills_masks = True
        """Whether this rank fills masks; False if another rank applies them."""
        self.counts_tokens = False
        """Whether count() must be called with the sampled tokens."""

    @property
    def entries(self) -> set[int]:
        """The entries in use."""
        return set(self._used)

    def add(self, rules: SequenceRules | None, tokens: NDArray[Any]) -> int:  # tokens: [num_tokens]
        """Add a sequence that gets a row, with all its tokens. Returns its entry, 0 if it has no rules."""
        if rules is None:
            return 0
        entry = self._free.pop()
        self._used[entry] = rules
        if rules.weights is not None:
            if self._counts is None:
                self._counts = TokenCounts(*self._sizes)
            _, _, repetition = rules.weights
            first = 0 if repetition != 1 else rules.num_prompt
            self._counts.start(entry, tokens[first:], rules.num_prompt - first)
            self._penalised[entry] = self.counts_tokens = True
        return entry

    def remove(self, entry: int) -> None:
        """Free the entry of a sequence that has lost its row."""
        if entry == 0:
            return
        del self._used[entry]
        self._free.append(entry)
        self._table = None  # the entry's next sequence has other rules
        if self._penalised[entry] and self._counts is not None:
            self._counts.clear(entry)
            self._penalised[entry] = False
            self.counts_tokens = bool(self._penalised.any())

    def count(self, entries: Int64s, tokens: Int64s) -> None:  # both [num_sampling]
        """Count the next token of each of these sequences."""
        if self._counts is not None:
            (penalised,) = self._penalised[entries].nonzero()
            self._counts.add(entries[penalised], tokens[penalised])

    def edits(
        self,
        entries: Int64s,  # [num_samples]
        positions: Int64s,  # [num_samples], index in its sequence of the token about to be sampled
        rows: Int64s,  # [num_samples]
        token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
        fill: Callable[[list[Masked]], StepMasks] | None = None,
    ) -> LogitEdits | None:
        """Edits of one step's logits; None if no sequence has rules. Masks are filled by threads while the model
        computes, unless `fill` makes them."""
        if not entries.any():
            return None
        table = self._table
        if table is None or not np.array_equal(table.entries, entries):
            table = self._table = self._tabulate(entries)
        banned = ends = masks = penalised = None
        if table.masks and self.fills_masks:
            masks = fill(table.masks) if fill else self._filler.begin(table.masks, positions, rows, token_ids)
        if table.bans is not None:
            samples, bans = table.bans
            apply = _banned(bans, positions[samples], rows[samples], token_ids)
            is_end = (bans.until != ALWAYS) if masks is not None else np.zeros(len(apply), np.bool_)
            banned, ends = _pairs(samples, bans, apply & ~is_end), _pairs(samples, bans, apply & is_end)
        if table.penalised is not None and self._counts is not None:
            samples, weights = table.penalised
            penalised = self._counts.penalties(entries[samples], samples, weights)
        return LogitEdits(banned, table.allowed, masks, ends, table.bias, penalised)

    def _tabulate(self, entries: Int64s) -> _Table:
        ruled = [(sample, self._used[entry]) for sample, entry in enumerate(entries.tolist()) if entry]
        masks = []
        for mask, group in groupby(ruled, key=lambda sample_and_rules: sample_and_rules[1].mask):
            if mask is not None:
                samples = [sample for sample, _ in group]
                masks.append(Masked(samples[0], len(samples), mask))
        return _Table(
            entries,
            _put_together(ruled, lambda rules: rules.allowed, lambda at, bits: TokenMasks(at, np.array(bits))),
            masks,
            _put_together(ruled, lambda rules: rules.bans, _join_bans),
            _put_together(ruled, lambda rules: rules.bias, _join_biases),
            _put_together(ruled, lambda rules: rules.weights, lambda at, weights: (at, np.array(weights, "f4").T)),
        )


def _put_together(
    ruled: list[tuple[int, SequenceRules]],  # samples and the rules of their sequences
    kind: Callable[[SequenceRules], Part | None],
    join: Callable[[Int64s, list[Part]], Joined],  # takes samples [n] and the part of each
) -> Joined | None:
    """Join the rules of one kind; None if no sample has one."""
    parts = [(sample, part) for sample, rules in ruled if (part := kind(rules)) is not None]
    if not parts:
        return None
    return join(np.array([sample for sample, _ in parts], np.int64), [part for _, part in parts])


def _join_biases(samples: Int64s, parts: list[tuple[Int64s, Float32s]]) -> Bias:
    ids, values = zip(*parts, strict=True)
    return Bias(np.repeat(samples, [len(some) for some in ids]), np.concatenate(ids), np.concatenate(values))


def _join_bans(samples: Int64s, parts: list[_Bans]) -> tuple[Int64s, _Bans]:
    """Stack all bans beside their samples, with prefixes as long as the longest of all."""
    samples = np.repeat(samples, [len(part.tokens) for part in parts])
    prefixes = np.full((len(samples), max(part.prefixes.shape[1] for part in parts)), ANY_TOKEN, np.int32)
    first = 0
    for part in parts:
        count, width = part.prefixes.shape
        prefixes[first : first + count, prefixes.shape[1] - width :] = part.prefixes
        first += count
    since, until, tokens = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("since", "until", "tokens")
    )
    return samples, _Bans(prefixes, since, until, tokens)


def _pairs(samples: Int64s, bans: _Bans, apply: NDArray[np.bool_]) -> Pairs | None:  # [n] each
    return (samples[apply], bans.tokens[apply]) if apply.any() else None


def _banned(
    bans: _Bans,
    positions: Int64s,  # [n], of the token that each ban's sample is about to become
    rows: Int64s,  # [n]
    token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
) -> NDArray[np.bool_]:  # [n]
    """Find the bans that apply."""
    longest = bans.prefixes.shape[1]
    columns = np.maximum(positions[:, None] - longest + np.arange(longest), 0)
    tokens = token_ids[rows[:, None], columns]
    same: NDArray[np.bool_] = ((tokens == bans.prefixes) | (bans.prefixes == ANY_TOKEN)).all(axis=1)
    return same & (bans.since <= positions) & (positions < bans.until)
