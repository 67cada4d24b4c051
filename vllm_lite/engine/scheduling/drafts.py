"""Drafts: a step's room that is left goes to sequences that draft tokens behind the one they get, as many as pay.

Like all that may be wrong they count as computed until the step's result takes back those that are.

A draft is right with the odds that the sequence's earlier ones had, its j-th one with the j-th power of them, and takes
the time that step_cost.py has for it. Drafts are made if they bring more tokens for the time than the step has without.
Odds are low until they are known: what a first answer loses by drafts that are wrong is not made up for by others.
"""

from collections import abc
from math import ceil, log

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.scheduling.step_plan import StepPlan, joined
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import Continue, Draft

MEMORY = 0.9
"""Weight of a sequence's earlier drafts beside those of its latest step: about the last ten steps count."""
PRIOR = 2.0
"""Number of drafts that the mean of all sequences counts for in the odds of one."""
ASKED = 4.0
"""Drafts, all of them made, that are taken to have been allowed before the first."""
FIRST = 1.5, 1.5
"""Drafts, right and wrong ones, that all sequences together are taken to have had before the first."""
PROBE_STEPS = 16
"""A sequence whose drafts do not pay has one in so many tokens, or fewer, to see whether they do again."""
PROBE_SHARE = 0.005
"""The most of the time that such drafts take."""
EARLY_PROBES = 3
"""The first steps with such drafts come so often whatever they take, as the times of the start may be wrong."""
LOOK_STEPS = 32
"""Where drafts bring little, one step in so many has none, to see whether it is as slow without as it was."""
SURE = 1.5
"""What drafts bring where nobody looks."""
GAIN = 1.02
"""What drafts must be expected to bring, as times and odds are estimates."""
CAPS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64
"""Lengths that are compared."""


class DraftLengths:
    """Chooses how many tokens each sequence may draft in a step."""

    def __init__(self, options: Options) -> None:
        self._most = options.num_drafts or options.num_forced
        self._is_fixed = not (options.num_drafts and options.adaptive_drafts)
        self._caps = [cap for cap in CAPS if cap < self._most] + [self._most]
        self._right, self._wrong = FIRST  # of all sequences, with a weight that falls with every step
        self._allowed = self._made = ASKED
        self._early_probes = EARLY_PROBES

    def odds(self, sequence: Sequence) -> float:
        """Estimate the chance that a draft is right where those before it were."""
        mean = self._right / (self._right + self._wrong)
        count = sequence.drafts_right + sequence.drafts_wrong
        return (sequence.drafts_right + PRIOR * mean) / (count + PRIOR)

    def learn(self, sequence: Sequence, num_drafted: int, num_tokens: int) -> None:
        """A step has drafted so many tokens for `sequence`, and given it so many."""
        if not num_drafted:
            return
        right = min(num_tokens - 1, num_drafted)
        wrong = right < num_drafted
        sequence.drafts_right = MEMORY * sequence.drafts_right + right
        sequence.drafts_wrong = MEMORY * sequence.drafts_wrong + wrong
        self._right = 0.99 * self._right + right
        self._wrong = 0.99 * self._wrong + wrong

    def learn_share(self, allowed: int, made: int) -> None:
        """A step has allowed so many drafts, and its drafter has made so many: one without a model finds none where
        nothing like the last tokens has been."""
        if allowed:
            self._allowed = 0.98 * self._allowed + allowed
            self._made = 0.98 * self._made + min(made, allowed)

    def choose(self, sequences: abc.Sequence[Sequence], num_rows: int, rates: Rates, step: int) -> list[int]:
        """The most drafts of each of these sequences in a step that has `num_rows` rows without them."""
        if self._is_fixed:
            return [self._most] * len(sequences)
        if not rates.row_s:  # the time by rows shows only in steps of different ones
            return [step % (self._most + 1)] * len(sequences)
        odds = [self.odds(sequence) for sequence in sequences]
        lengths, gain = self._paying(odds, num_rows, rates)
        if gain < SURE and step % LOOK_STEPS == 0:
            return [0] * len(sequences)
        if not all(lengths):
            every = self._probe_every(len(sequences), num_rows, rates) if self._early_probes <= 0 else PROBE_STEPS
            probed = [
                int(not length and each.num_output % every == every - 1)
                for each, length in zip(sequences, lengths, strict=True)
            ]
            self._early_probes -= any(probed)
            lengths = [length or probe for length, probe in zip(lengths, probed, strict=True)]
        return lengths

    def _paying(self, odds: list[float], num_rows: int, rates: Rates) -> tuple[list[int], float]:
        """The lengths that bring most for their time, zeros where none does, and how many times as much they bring."""
        plain = num_rows / rates.decode_s(num_rows)
        found, best = [0] * len(odds), GAIN * plain
        share = self._made / self._allowed
        if not self._may_pay(max(odds), len(odds), num_rows, rates):
            return found, 1.0
        for cap in self._caps:
            # What a row brings must make up for its time at the rate that there is without it.
            lengths = [min(cap, self._length(each, rates.row_s * best)) for each in odds]
            longest = max(lengths)
            gained = share * sum(_expected(*each) for each in zip(odds, lengths, strict=True))
            more = ceil(share * sum(lengths))
            rate = (num_rows + gained) / rates.decode_s(num_rows + more, longest)
            if rate > best:
                found, best = lengths, rate
            if longest < cap:
                break
        return found, best / plain

    def _may_pay(self, odds: float, count: int, num_rows: int, rates: Rates) -> bool:
        """Whether drafts would pay if all sequences had the best odds, which is quickly found out."""
        least = GAIN * num_rows / rates.decode_s(num_rows)
        return any(
            num_rows + count * _expected(odds, cap) > least * rates.decode_s(num_rows + cap, cap) for cap in self._caps
        )

    def _probe_every(self, count: int, num_rows: int, rates: Rates) -> int:
        """Number of tokens, one of which is drafted for although that does not pay; the sequences do so together."""
        plain_s = rates.decode_s(num_rows)
        return max(PROBE_STEPS, int((rates.decode_s(num_rows + count, 1) / plain_s - 1) / PROBE_SHARE))

    def _length(self, odds: float, least: float) -> int:
        """Number of drafts whose chance, that all up to it are right, is `least` or more."""
        if odds < least:
            return 0
        return self._most if odds >= 1 or least <= 0 else min(self._most, int(log(least) / log(odds)))


def _expected(odds: float, length: int) -> float:
    """The number of `length` drafts that come to be right."""
    return float(length) if odds >= 1 else odds * (1 - odds**length) / (1 - odds)


def add_drafts(plan: StepPlan, kv: KVCacheManager, lengths: abc.Sequence[int]) -> None:
    """Let decoding sequences draft, at most `lengths`, with the tokens that are left. None is preempted for it."""
    share = plan.budget // len(plan.draftable)
    for (place, sequence), most in zip(plan.draftable, lengths, strict=True):
        end = sequence.num_tokens + sequence.num_pending  # with the token that this step samples
        count = kv.most_drafts(sequence, min(share, most, sequence.max_len - end))
        if count <= 0 or sequence.status is not Status.RUNNING:
            continue
        entry = plan.entries[place]
        new_ids = entry.new_block_ids if isinstance(entry, Continue) else []
        if end - 1 + count > sequence.num_slots:
            sequence.num_computed -= 1  # the step still reads what its one token needs
            growth = kv.grow(sequence, end - 1 + count)
            sequence.num_computed += 1
            if growth is None:
                continue
            new_ids = joined(new_ids, growth.new_ids)
            plan.entries += growth.entries
        plan.entries[place] = Draft(sequence.handle, count, new_ids)
        plan.drafted.append((sequence, count))
        sequence.drafts(count)
        plan.take(count)
