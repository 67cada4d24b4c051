"""The rules that some sequences have for their logits, and what they mean for one step.

Most sequences have none and cost nothing. The others have a slot from the time they enter the batch to the time they
leave it, in whichever row they stand. What their rules say of a step is put together once for as long as the same
sequences sample; what differs from step to step, which tokens are there, is worked out for all of them at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.worker.sampling.logit_edits import NEVER, Float32s, Held, LogitEdits, Pairs, penalties
from vllm_lite.worker.sampling.token_counts import TokenCounts

Int64s = NDArray[np.int64]

NO_RULES = LogitRules()
ANY_TOKEN = -1


@dataclass(frozen=True, slots=True)
class _Words:
    """What must not be completed, token by token."""

    prefixes: NDArray[np.int32]  # [num_words, longest], all but the last, at the end of the row; before them ANY_TOKEN
    lengths: Int64s  # [num_words], how many these are
    lasts: Int64s  # [num_words]


@dataclass(frozen=True, slots=True)
class _Rules:
    """Of one sequence, in the form in which those of several are put together."""

    sampling: Sampling
    allowed: Int64s
    bias: tuple[Int64s, Float32s]
    stops: Int64s  # token ids that may come from `sampling.min_tokens_until` on
    words: _Words


@dataclass(frozen=True, slots=True)
class _Table:
    """What the rules of a step's samples say, as long as the samples are of the same sequences."""

    slots: Int64s  # [num_samples]
    allowed: Held | None
    bias: Held | None
    stops: Pairs | None
    words: tuple[Int64s, _Words] | None  # samples [num_words]
    penalised: Int64s | None  # samples


class RuleBook:
    """Slots 1 to `max_num_seqs`; slot 0 is that of all sequences without rules."""

    def __init__(self, max_num_seqs: int, vocab_size: int, max_tokens: int) -> None:
        self._sizes = max_num_seqs + 1, vocab_size, max_tokens
        self._vocab_size = vocab_size
        self._free = list(range(max_num_seqs, 0, -1))
        self._used: dict[int, _Rules] = {}  # by slot
        self._starts = np.zeros(max_num_seqs + 1, np.int64)  # where in the sequence the output begins
        self._until = np.zeros(max_num_seqs + 1, np.int64)  # length of the sequence from which on it may stop
        self._weights = np.zeros((3, max_num_seqs + 1), np.float32)  # presence, frequency, repetition
        self._penalised = np.zeros(max_num_seqs + 1, np.bool_)
        self._counts: TokenCounts | None = None  # made when the first sequence needs it
        self._table: _Table | None = None
        self.counts_tokens = False
        """Whether `count` must be told what is sampled."""

    @property
    def slots(self) -> set[int]:
        """In use."""
        return set(self._used)

    def add(self, sampling: Sampling, tokens: NDArray[Any], num_prompt: int) -> int:  # tokens: [num_tokens]
        """A sequence comes in with all its tokens. Its slot, 0 if it has no rules."""
        if not sampling.is_ruled:
            return 0
        slot = self._free.pop()
        self._used[slot] = _read(sampling, self._vocab_size)
        self._starts[slot], self._until[slot] = num_prompt, sampling.min_tokens_until
        rules = sampling.rules or NO_RULES
        if rules.penalises:
            self._weights[:, slot] = rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty
            if self._counts is None:
                self._counts = TokenCounts(*self._sizes)
            first = 0 if rules.repetition_penalty != 1 else num_prompt
            self._counts.start(slot, tokens[first:], num_prompt - first)
            self._penalised[slot] = self.counts_tokens = True
        return slot

    def remove(self, slot: int) -> Sampling | None:
        """The sequence leaves; its rules, for `add` when it comes back."""
        if slot == 0:
            return None
        rules = self._used.pop(slot)
        self._free.append(slot)
        self._table = None  # the slot's next sequence has other rules
        if self._penalised[slot] and self._counts is not None:
            self._counts.clear(slot)
            self._penalised[slot] = False
            self.counts_tokens = bool(self._penalised.any())
        return rules.sampling

    def penalises(self, slot: int) -> bool:
        return bool(self._penalised[slot])

    def count(self, slots: Int64s, tokens: Int64s) -> None:  # both [num_sampling]
        """Sequences have got their next tokens."""
        if self._counts is not None:
            (places,) = self._penalised[slots].nonzero()
            self._counts.add(slots[places], tokens[places])

    def of_step(
        self,
        slots: Int64s,  # [num_samples]
        positions: Int64s,  # [num_samples], index in its sequence of the token about to be sampled
        rows: Int64s,  # [num_samples]
        token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
    ) -> tuple[Pairs | None, LogitEdits | None]:
        """What the samples must not be, and what else changes their logits."""
        table = self._table
        if table is None or not np.array_equal(table.slots, slots):
            table = self._table = self._tabulate(slots)
        banned = []
        if table.stops is not None:
            samples, ids = table.stops
            early = self._until[slots[samples]] > positions[samples]
            banned.append((samples[early], ids[early]))
        if table.words is not None:
            samples, words = table.words
            ends, starts = positions[samples], self._starts[slots[samples]]
            same = _begun(words, ends, starts, rows[samples], token_ids)
            banned.append((samples[same], words.lasts[same]))
        penalised = None
        if table.penalised is not None and self._counts is not None:
            their_slots = slots[table.penalised]
            penalised = penalties(self._counts.of(their_slots), table.penalised, *self._weights[:, their_slots])
        edits = None
        if table.allowed is not None or table.bias is not None or penalised is not None:
            edits = LogitEdits(table.allowed, table.bias, penalised)
        return _joined(banned), edits

    def _tabulate(self, slots: Int64s) -> _Table:
        ruled = [(sample, self._used[slot]) for sample, slot in enumerate(slots.tolist()) if slot]
        biased = _stacked([(sample, rules.bias[0]) for sample, rules in ruled])
        (penalised,) = self._penalised[slots].nonzero()
        return _Table(
            slots,
            allowed=_mask([(sample, rules.allowed) for sample, rules in ruled], self._vocab_size),
            bias=None if biased is None else Held(*biased, np.concatenate([rules.bias[1] for _, rules in ruled])),
            stops=_stacked([(sample, rules.stops) for sample, rules in ruled]),
            words=_stacked_words([(sample, rules.words) for sample, rules in ruled]),
            penalised=penalised if len(penalised) else None,
        )


def _read(sampling: Sampling, vocab_size: int) -> _Rules:
    rules = sampling.rules or NO_RULES
    bias_ids, bias_values = zip(*rules.bias, strict=True) if rules.bias else ((), ())
    stops = np.array(sampling.stop_ids if sampling.min_tokens_until else (), np.int64)
    words = rules.bad_words
    lengths = np.array([len(word) - 1 for word in words], np.int64)
    prefixes = np.full((len(words), lengths.max(initial=0)), ANY_TOKEN, np.int32)
    for prefix, word in zip(prefixes, words, strict=True):
        prefix[len(prefix) - len(word) + 1 :] = word[:-1]
    return _Rules(
        sampling,
        allowed=np.frombuffer(rules.allowed, "<u4").astype(np.int64),
        bias=(np.array(bias_ids, np.int64), np.array(bias_values, np.float32)),
        stops=stops[stops < vocab_size],
        words=_Words(prefixes, lengths, np.array([word[-1] for word in words], np.int64)),
    )


def _stacked(parts: Iterable[tuple[int, Int64s]]) -> Pairs | None:
    """Samples beside their token ids; None if there are none."""
    some = [(sample, ids) for sample, ids in parts if len(ids)]
    if not some:
        return None
    samples = np.array([sample for sample, _ in some], np.int64)
    return np.repeat(samples, [len(ids) for _, ids in some]), np.concatenate([ids for _, ids in some])


def _mask(parts: Iterable[tuple[int, Int64s]], vocab_size: int) -> Held | None:
    """Of samples that have allowed tokens; None if there are none. See LogitEdits."""
    some = [(sample, ids) for sample, ids in parts if len(ids)]
    if not some:
        return None
    mask = np.full((len(some), vocab_size), NEVER, np.float32)
    for row, (_, ids) in zip(mask, some, strict=True):
        row[ids] = 0
    return Held(np.array([sample for sample, _ in some], np.int64), mask)


def _stacked_words(parts: Sequence[tuple[int, _Words]]) -> tuple[Int64s, _Words] | None:
    """All words, with prefixes as long as the longest of all, beside their samples; None if there are none."""
    pairs = _stacked([(sample, words.lasts) for sample, words in parts])
    if pairs is None:
        return None
    samples, lasts = pairs
    prefixes = np.full((len(lasts), max(words.prefixes.shape[1] for _, words in parts)), ANY_TOKEN, np.int32)
    at = 0
    for _, words in parts:
        count, width = words.prefixes.shape
        prefixes[at : at + count, prefixes.shape[1] - width :] = words.prefixes
        at += count
    return samples, _Words(prefixes, np.concatenate([words.lengths for _, words in parts]), lasts)


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
    """All of them; a pair may occur twice, None if there is none."""
    if not sum(len(samples) for samples, _ in banned):
        return None
    return np.concatenate([samples for samples, _ in banned]), np.concatenate([ids for _, ids in banned])
