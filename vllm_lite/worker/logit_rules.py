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

from vllm_lite.protocol.step import LogitRules, Sampling
from vllm_lite.worker.logit_edits import Float32s, LogitEdits, Pairs, penalties
from vllm_lite.worker.token_counts import TokenCounts

Int64s = NDArray[np.int64]

NO_RULES = LogitRules()
ANY_TOKEN = -1


@dataclass(frozen=True, slots=True)
class _Words:
    """What must not be completed, for some samples; all arrays run over pairs of a sample and a word."""

    samples: Int64s  # [num_words]
    starts: Int64s  # [num_words], where in the sequence the output begins
    lengths: Int64s  # [num_words], tokens before the last one
    prefixes: NDArray[np.int32]  # [num_words, longest], those tokens, at the end of their row; before them ANY_TOKEN
    lasts: Int64s  # [num_words]


@dataclass(frozen=True, slots=True)
class _Table:
    """What the rules of a step's samples say, as long as the samples are of the same sequences."""

    slots: Int64s  # [num_samples]
    allowed: Pairs | None
    bias: tuple[Pairs, Float32s] | None
    stops: tuple[Int64s, Int64s, Int64s] | None  # samples, token ids, sequence length from which on they may come
    words: _Words | None
    penalised: Int64s | None  # samples


class RuleBook:
    """Slots 1 to `max_num_seqs`; slot 0 is that of all sequences without rules."""

    def __init__(self, max_num_seqs: int, vocab_size: int, max_tokens: int) -> None:
        self._sizes = max_num_seqs + 1, vocab_size, max_tokens
        self._vocab_size = vocab_size
        self._free = list(range(max_num_seqs, 0, -1))
        self._used: dict[int, tuple[Sampling, int]] = {}  # by slot; the number is where the output begins
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
        self._used[slot] = sampling, num_prompt
        self._table = None
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
        sampling, _ = self._used.pop(slot)
        self._free.append(slot)
        self._table = None
        if self._penalised[slot] and self._counts is not None:
            self._counts.clear(slot)
            self._penalised[slot] = False
            self.counts_tokens = bool(self._penalised.any())
        return sampling

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
            samples, ids, until = table.stops
            early = until > positions[samples]
            banned.append((samples[early], ids[early]))
        if table.words is not None:
            banned.append(_completed(table.words, positions, rows, token_ids))
        penalised = None
        if table.penalised is not None and self._counts is not None:
            their_slots = slots[table.penalised]
            penalised = penalties(self._counts.of(their_slots), table.penalised, *self._weights[:, their_slots])
        edits = None
        if table.allowed is not None or table.bias is not None or penalised is not None:
            edits = LogitEdits(table.allowed, table.bias, penalised)
        return _joined(banned), edits

    def _tabulate(self, slots: Int64s) -> _Table:
        ruled = [(sample, *self._used[slot]) for sample, slot in enumerate(slots.tolist()) if slot]
        rules = [(sample, sampling.rules or NO_RULES, start) for sample, sampling, start in ruled]
        allowed = [(sample, np.frombuffer(rule.allowed, "<u4")) for sample, rule, _ in rules if rule.allowed]
        biases = [(sample, *pair) for sample, rule, _ in rules for pair in rule.bias]
        stops = [
            (sample, stop, sampling.min_tokens_until)
            for sample, sampling, _ in ruled
            if sampling.min_tokens_until
            for stop in sampling.stop_ids
            if stop < self._vocab_size
        ]
        words = [(sample, start, word) for sample, rule, start in rules for word in rule.bad_words]
        (penalised,) = self._penalised[slots].nonzero()
        return _Table(
            slots,
            allowed=_pairs(allowed) if allowed else None,
            bias=_biases(biases) if biases else None,
            stops=_columns(stops) if stops else None,
            words=_words(words) if words else None,
            penalised=penalised if len(penalised) else None,
        )


def _pairs(allowed: Sequence[tuple[int, NDArray[np.uint32]]]) -> Pairs:
    samples = np.repeat([sample for sample, _ in allowed], [len(ids) for _, ids in allowed])
    return samples.astype(np.int64), np.concatenate([ids for _, ids in allowed]).astype(np.int64)


def _biases(biases: Iterable[tuple[int, int, float]]) -> tuple[Pairs, Float32s]:
    samples, ids, values = zip(*biases, strict=True)
    return (np.array(samples, np.int64), np.array(ids, np.int64)), np.array(values, np.float32)


def _columns(rows: Iterable[tuple[int, int, int]]) -> tuple[Int64s, Int64s, Int64s]:
    first, second, third = np.array(list(rows), np.int64).T
    return first, second, third


def _words(words: Sequence[tuple[int, int, tuple[int, ...]]]) -> _Words:
    samples, starts, sequences = zip(*words, strict=True)
    lengths = np.array([len(sequence) - 1 for sequence in sequences], np.int64)
    prefixes = np.full((len(words), lengths.max()), ANY_TOKEN, np.int32)
    for prefix, sequence in zip(prefixes, sequences, strict=True):
        prefix[len(prefix) - len(sequence) + 1 :] = sequence[:-1]
    lasts = np.array([sequence[-1] for sequence in sequences], np.int64)
    return _Words(np.array(samples, np.int64), np.array(starts, np.int64), lengths, prefixes, lasts)


def _completed(words: _Words, positions: Int64s, rows: Int64s, token_ids: NDArray[np.int32]) -> Pairs:
    """The last tokens of those words whose other tokens stand at the end of the output."""
    ends = positions[words.samples]
    longest = words.prefixes.shape[1]
    columns = np.maximum(ends[:, None] - longest + np.arange(longest), 0)
    tokens = token_ids[rows[words.samples][:, None], columns]
    same = ((tokens == words.prefixes) | (words.prefixes == ANY_TOKEN)).all(axis=1)
    same &= ends - words.lengths >= words.starts
    return words.samples[same], words.lasts[same]


def _joined(banned: Sequence[Pairs]) -> Pairs | None:
    """All of them; a pair may occur twice, None if there is none."""
    if not sum(len(samples) for samples, _ in banned):
        return None
    return np.concatenate([samples for samples, _ in banned]), np.concatenate([ids for _, ids in banned])
