"""The rules that some sequences have for their logits, and what they change in one step.

The order of the rules is vLLM's: allowed ids, masks, bad words and stop ids before min_tokens rule tokens out; then
logit_bias is added; then penalties apply (penalties.py). Most sequences have no rules and cost nothing. The others have
an entry in the RuleBook for as long as they have a row. What their rules say of a step is put together once for as long
as the same sequences sample; what differs from step to step is worked out for all of them at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.worker.sampling.masks import NEVER, MaskSourceOf, SequenceMask, StepMasks, masks_of_step
from vllm_lite.worker.sampling.penalties import Float32s, Int64s, Penalties, TokenCounts, penalties

Pairs = tuple[Int64s, Int64s]
"""Samples and token ids, both [num_pairs]."""

NO_RULES = LogitRules()
ANY_TOKEN = -1


# ---- one step


class Held:
    """Arrays that are the same for many steps: they are brought to the logits' device once."""

    __slots__ = ("_arrays", "_tensors")

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        self._tensors: tuple[torch.Tensor, ...] | None = None

    def on(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._tensors is None:
            self._tensors = tuple(torch.from_numpy(array).to(logits.device) for array in self._arrays)
        return self._tensors


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What one step changes in its logits, in the order of the fields.

    A logit that is minus infinity before one of the changes stays so; so does one that is not a number, unless banned.
    """

    banned: Pairs | None = None
    """What becomes minus infinity; a pair may occur twice."""
    allowed: Held | None = None
    """Samples [n], and what is added to all their logits: 0 or minus infinity, float32 [n, vocab]."""
    masks: StepMasks | None = None
    bias: Held | None = None
    """Samples, token ids, and what is added: [num_pairs] each, no pair twice."""
    penalties: Penalties | None = None

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        if self.banned is not None:
            logits[tuple(torch.from_numpy(array).to(logits.device) for array in self.banned)] = NEVER
        if self.allowed is not None:
            logits.index_add_(0, *self.allowed.on(logits))
        if self.masks is not None:
            self.masks.apply(logits)
        if self.bias is not None:
            samples, ids, values = self.bias.on(logits)
            logits[samples, ids] += values
        if self.penalties is not None:
            self.penalties.apply(logits)


# ---- one sequence


@dataclass(frozen=True, slots=True)
class _Words:
    """Words that must not be completed, token by token."""

    prefixes: NDArray[np.int32]  # [num_words, longest], all but the last, at the end of the row; before them ANY_TOKEN
    lengths: Int64s  # [num_words], how many these are
    lasts: Int64s  # [num_words]


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """The rules of one sequence, in the form in which those of several are put together. It keeps them while it is
    preempted; a fork has its own."""

    num_prompt: int
    min_tokens_until: int  # length of the sequence from which on one of `stops` may come
    stops: Int64s
    allowed: Int64s
    bias: tuple[Int64s, Float32s]
    words: _Words
    weights: tuple[float, float, float] | None  # presence, frequency and repetition penalty
    mask: SequenceMask | None


def read_rules(
    sampling: Sampling, num_prompt: int, vocab_size: int, mask_source_of: MaskSourceOf | None
) -> SequenceRules | None:
    """The rules of a new sequence; None if it has none."""
    if not sampling.is_ruled:
        return None
    rules = sampling.rules or NO_RULES
    bias_ids, bias_values = zip(*rules.bias, strict=True) if rules.bias else ((), ())
    stops = np.array(sampling.stop_ids if sampling.min_tokens_until else (), np.int64)
    weights = rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty
    source = mask_source_of(sampling) if mask_source_of else None
    return SequenceRules(
        num_prompt=num_prompt,
        min_tokens_until=sampling.min_tokens_until,
        stops=stops[stops < vocab_size],
        allowed=np.frombuffer(rules.allowed, "<u4").astype(np.int64),
        bias=(np.array(bias_ids, np.int64), np.array(bias_values, np.float32)),
        words=_read_words(rules.bad_words),
        weights=weights if rules.penalises else None,
        mask=None if source is None else SequenceMask(source, num_prompt),
    )


def _read_words(words: Sequence[tuple[int, ...]]) -> _Words:
    lengths = np.array([len(word) - 1 for word in words], np.int64)
    prefixes = np.full((len(words), lengths.max(initial=0)), ANY_TOKEN, np.int32)
    for prefix, word in zip(prefixes, words, strict=True):
        prefix[len(prefix) - len(word) + 1 :] = word[:-1]
    return _Words(prefixes, lengths, np.array([word[-1] for word in words], np.int64))


# ---- the sequences that have a row


@dataclass(frozen=True, slots=True)
class _Table:
    """What the rules of a step's samples say, as long as the samples are of the same sequences."""

    entries: Int64s  # [num_samples]
    allowed: Held | None
    bias: Held | None
    stops: tuple[Pairs, Int64s] | None  # and the length from which on each may come
    words: tuple[Int64s, Int64s, _Words] | None  # samples and where their output begins [num_words]
    masks: list[tuple[int, int, SequenceMask]]  # first sample, number of samples, mask
    penalised: tuple[Int64s, Float32s] | None  # samples [n], weights [3, n]


class RuleBook:
    """The rules of the sequences that have a row. Entry 0 is that of all sequences without rules."""

    def __init__(self, max_num_seqs: int, vocab_size: int, max_tokens: int) -> None:
        self._sizes = max_num_seqs + 1, vocab_size, max_tokens
        self._vocab_size = vocab_size
        self._free = list(range(max_num_seqs, 0, -1))
        self._used: dict[int, SequenceRules] = {}  # by entry
        self._penalised = np.zeros(max_num_seqs + 1, np.bool_)
        self._counts: TokenCounts | None = None  # made when the first sequence needs it
        self._table: _Table | None = None
        self.counts_tokens = False
        """Whether `count` must be called with what is sampled."""

    @property
    def entries(self) -> set[int]:
        """The entries in use."""
        return set(self._used)

    def add(self, rules: SequenceRules | None, tokens: NDArray[Any]) -> int:  # tokens: [num_tokens]
        """A sequence gets a row, with all its tokens. Returns its entry, 0 if it has no rules."""
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
        """The sequence has lost its row."""
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
        """Sequences have got their next tokens."""
        if self._counts is not None:
            (penalised,) = self._penalised[entries].nonzero()
            self._counts.add(entries[penalised], tokens[penalised])

    def edits(
        self,
        entries: Int64s,  # [num_samples]
        positions: Int64s,  # [num_samples], index in its sequence of the token about to be sampled
        rows: Int64s,  # [num_samples]
        token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
    ) -> LogitEdits | None:
        """What the rules change in one step's logits."""
        if not entries.any():
            return None
        table = self._table
        if table is None or not np.array_equal(table.entries, entries):
            table = self._table = self._tabulate(entries)
        banned = []
        if table.stops is not None:
            (samples, ids), until = table.stops
            early = until > positions[samples]
            banned.append((samples[early], ids[early]))
        if table.words is not None:
            samples, starts, words = table.words
            same = _begun(words, positions[samples], starts, rows[samples], token_ids)
            banned.append((samples[same], words.lasts[same]))
        masks = masks_of_step(table.masks, positions, rows, token_ids, self._vocab_size) if table.masks else None
        penalised = None
        if table.penalised is not None and self._counts is not None:
            samples, weights = table.penalised
            penalised = penalties(self._counts.of(entries[samples]), samples, weights)
        return LogitEdits(_joined(banned), table.allowed, masks, table.bias, penalised)

    def _tabulate(self, entries: Int64s) -> _Table:
        ruled = [(sample, self._used[entry]) for sample, entry in enumerate(entries.tolist()) if entry]
        biased = _stacked([(sample, rules.bias[0]) for sample, rules in ruled])
        stops = _stacked([(sample, rules.stops) for sample, rules in ruled])
        until = [rules.min_tokens_until for _, rules in ruled for _ in rules.stops]
        masks = []
        for mask, group in groupby(ruled, key=lambda sample_and_rules: sample_and_rules[1].mask):
            if mask is not None:
                samples = [sample for sample, _ in group]
                masks.append((samples[0], len(samples), mask))
        return _Table(
            entries,
            allowed=_allowed(ruled, self._vocab_size),
            bias=None if biased is None else Held(*biased, np.concatenate([rules.bias[1] for _, rules in ruled])),
            stops=None if stops is None else (stops, np.array(until, np.int64)),
            words=_stacked_words(ruled),
            masks=masks,
            penalised=_stacked_weights(ruled),
        )


_Ruled = list[tuple[int, SequenceRules]]
"""Samples beside the rules of their sequences."""


def _stacked(parts: Iterable[tuple[int, Int64s]]) -> Pairs | None:
    """Samples beside their token ids; None if there are none."""
    some = [(sample, ids) for sample, ids in parts if len(ids)]
    if not some:
        return None
    samples = np.array([sample for sample, _ in some], np.int64)
    return np.repeat(samples, [len(ids) for _, ids in some]), np.concatenate([ids for _, ids in some])


def _stacked_weights(ruled: _Ruled) -> tuple[Int64s, Float32s] | None:
    """Penalised samples beside their penalties; None if there are none."""
    some = [(sample, rules.weights) for sample, rules in ruled if rules.weights is not None]
    if not some:
        return None
    samples, weights = zip(*some, strict=True)
    return np.array(samples, np.int64), np.array(weights, np.float32).T


def _allowed(ruled: _Ruled, vocab_size: int) -> Held | None:
    """What is added to samples that have allowed tokens, see LogitEdits; None if there are none."""
    some = [(sample, rules.allowed) for sample, rules in ruled if len(rules.allowed)]
    if not some:
        return None
    added = np.full((len(some), vocab_size), NEVER, np.float32)
    for row, (_, ids) in zip(added, some, strict=True):
        row[ids] = 0
    return Held(np.array([sample for sample, _ in some], np.int64), added)


def _stacked_words(ruled: _Ruled) -> tuple[Int64s, Int64s, _Words] | None:
    """All words, with prefixes as long as the longest of all, beside their samples and where the output of each begins;
    None if there are none."""
    pairs = _stacked([(sample, rules.words.lasts) for sample, rules in ruled])
    if pairs is None:
        return None
    samples, lasts = pairs
    prefixes = np.full((len(lasts), max(rules.words.prefixes.shape[1] for _, rules in ruled)), ANY_TOKEN, np.int32)
    first = 0
    for _, rules in ruled:
        count, width = rules.words.prefixes.shape
        prefixes[first : first + count, prefixes.shape[1] - width :] = rules.words.prefixes
        first += count
    starts = np.array([rules.num_prompt for _, rules in ruled for _ in rules.words.lasts], np.int64)
    return samples, starts, _Words(prefixes, np.concatenate([rules.words.lengths for _, rules in ruled]), lasts)


def _begun(
    words: _Words,
    ends: Int64s,  # [num_words], where in its sequence the next token of each sample will be
    starts: Int64s,  # [num_words], where the output of each begins
    rows: Int64s,  # [num_words]
    token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
) -> NDArray[np.bool_]:  # [num_words]
    """Whether the output ends with all of the word but its last token."""
    longest = words.prefixes.shape[1]
    columns = np.maximum(ends[:, None] - longest + np.arange(longest), 0)
    tokens = token_ids[rows[:, None], columns]
    same = ((tokens == words.prefixes) | (words.prefixes == ANY_TOKEN)).all(axis=1)
    begun: NDArray[np.bool_] = same & (ends - words.lengths >= starts)
    return begun


def _joined(banned: Sequence[Pairs]) -> Pairs | None:
    """All pairs in one; None if there is none."""
    if not sum(len(samples) for samples, _ in banned):
        return None
    return np.concatenate([samples for samples, _ in banned]), np.concatenate([ids for _, ids in banned])
