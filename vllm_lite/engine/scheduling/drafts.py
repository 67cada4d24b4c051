"""Drafts: the budget that a step has left is given to decoding sequences, which draft as many further tokens as pay.

Drafts count as computed from the moment they are scheduled; the step's result rolls back the rejected ones.

A draft is expected to be accepted at the rate of the sequence's latest drafts, the j-th draft of a step with the j-th
power of that rate, and to take the time that step_cost.py estimates. Drafts are made if they bring more tokens for
their time than the step makes without them. Low rates are assumed at first, because what rejected drafts cost a first
answer is not regained. Those of the model's own drafts (method self) are high, as 4 bits change few of its tokens.

Rates and times are estimates. So if no drafts pay, a probe is made now and then, and an accepted probe is followed by
another at once. If drafts pay, a longer length than the best one is tried now and then.
"""

from collections import abc
from math import ceil, log
from typing import NamedTuple

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.rates import Rates, factor_place
from vllm_lite.engine.scheduling.step_plan import StepPlan, joined
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import Continue, Draft, SureDrafts

MEMORY = 0.9
"""Factor by which each step lowers the weight of a sequence's earlier drafts: about the last ten steps count."""
PRIOR = 2.0
"""Weight, in drafts, of the mean rate of all sequences in the rate of one."""
ASKED = 4.0
"""Number of drafts that are assumed, at the start, to have been allowed and made."""
FIRST = 1.5, 1.5
"""Numbers of accepted and rejected drafts that are assumed at the start."""
FIRST_OWN = 4.0, 1.0
"""FIRST for the method "self"."""
PROBE_STEPS = 16
"""Minimum number of tokens between probes: single drafts of a sequence whose drafts do not pay."""
PROBE_SHARE = 0.005
"""Maximum share of the time that probes take."""
EARLY_PROBES = 3
"""Number of first probes that PROBE_SHARE does not limit, because times measured at the start may be wrong."""
LOOK_STEPS = 32
"""If drafts gain less than SURE, one step in this many has none, to measure its time again."""
FIRST_LOOKS = 4
"""Number of first steps of about as many rows that have no drafts, if there are several sequences."""
SURE = 1.5
"""Gain from which every step has drafts."""
GAIN = 1.02
"""Minimum expected gain of drafts, because rates and times are estimates."""
TRY_STEPS = 32
"""If drafts pay, one step in this many tries the next longer length of CAPS."""
TRY_LEAST = 0.75
"""Minimum tokens per second that are expected of that length, as a share of those of the best one."""
MOST_ODDS = 0.95
"""Maximum chance of acceptance that is required of a draft, and the one that is assumed of sure drafts."""
CAPS = 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63
"""Lengths that are compared. With the row of its last token, a sequence then has one of the numbers in STEP_ROWS."""
SCORED = "ngram", "suffix"
"""Methods whose drafters estimate the chance of each draft, and propose only drafts that pay."""
SCORED_PROBE = 4
"""Length of their probes. If no draft is sure, a probe costs only the search."""
RARE, RARE_STEPS = 0.1, 8
"""If such a drafter makes less than the share RARE of the allowed drafts, several sequences search only in one of
RARE_STEPS steps, as searches take a few percent of a step. Sequences whose latest drafts were all accepted search in
each, as a copied text mostly goes on."""


class ChosenLengths(NamedTuple):
    """The lengths that pay, which hold for these sequences, rows and rates until drafts were asked for."""

    sequences: abc.Sequence[Sequence]
    num_rows: int
    rates: Rates
    price: SureDrafts | None
    odds: list[float]
    lengths: list[int]
    gain: float
    """Factor by which these lengths raise the tokens per second."""
    probe_every: int
    """Number of tokens between probes; unused if drafts of all sequences pay."""

    def is_of(self, sequences: abc.Sequence[Sequence], num_rows: int, rates: Rates) -> bool:
        return self.rates is rates and self.num_rows == num_rows and self.sequences == sequences


class DraftLengths:
    """Chooses how many tokens each sequence may draft in a step."""

    def __init__(self, options: Options) -> None:
        self._most = options.num_drafts or options.num_forced
        self._is_fixed = not (options.num_drafts and options.adaptive_drafts)
        self._caps = [cap for cap in CAPS if cap < self._most] + [self._most]
        first = FIRST_OWN if options.draft_method == "self" else FIRST
        self._right, self._wrong = first  # of all sequences, with a weight that falls with every step
        self._allowed = self._made = ASKED
        self._early_probes = EARLY_PROBES
        self._is_scored = options.draft_method in SCORED
        self._probe = min(self._most, SCORED_PROBE) if self._is_scored else 1
        self.price: SureDrafts | None = None
        """The price of drafts in the latest step, for a drafter that knows their odds."""
        self._looks: dict[int, int] = {}
        self._choice: ChosenLengths | None = None
        """The latest choice; None once it does not hold any more. While nothing is drafted it holds for many steps."""

    def odds(self, sequence: Sequence) -> float:
        """Estimate the chance that a draft is accepted if the drafts before it in its step were."""
        mean = self._right / (self._right + self._wrong)
        count = sequence.drafts_right + sequence.drafts_wrong
        return (sequence.drafts_right + PRIOR * mean) / (count + PRIOR)

    def learn(self, sequence: Sequence, num_drafted: int, num_tokens: int) -> None:
        """Learn from a step that drafted `num_drafted` tokens for `sequence`, and gave it `num_tokens`."""
        if not num_drafted:
            return
        self._choice = None
        right = min(num_tokens - 1, num_drafted)
        wrong = right < num_drafted
        sequence.drafts_right = MEMORY * sequence.drafts_right + right
        sequence.drafts_wrong = MEMORY * sequence.drafts_wrong + wrong
        sequence.drafts_hold = not wrong
        self._right = 0.99 * self._right + right
        self._wrong = 0.99 * self._wrong + wrong

    def learn_share(self, allowed: int, made: int) -> None:
        """Learn from a step that allowed `allowed` drafts, of which `made` were made: a drafter without a model finds
        none if nothing like the last tokens has occurred."""
        if allowed:
            self._choice = None
            self._allowed = 0.98 * self._allowed + allowed
            self._made = 0.98 * self._made + min(made, allowed)

    def choose(self, sequences: abc.Sequence[Sequence], num_rows: int, rates: Rates, step: int) -> list[int]:
        """The most drafts of each of these sequences in a step that has `num_rows` rows without them."""
        if self._is_fixed:
            return [self._most] * len(sequences)
        if not rates.row_s:  # the time by rows shows only in steps of different ones
            return [step % ((self._most if len(sequences) == 1 else 1) + 1)] * len(sequences)
        if self._is_new(num_rows):
            return [0] * len(sequences)
        choice = self._choice
        if choice is None or not choice.is_of(sequences, num_rows, rates):
            self._choice = choice = self._choose(sequences, num_rows, rates)
        self.price, lengths = choice.price, choice.lengths
        if choice.gain < SURE and step % LOOK_STEPS == 0:
            return [0] * len(sequences)
        if self._is_scored and len(sequences) > 1 and self._share() < RARE and step % RARE_STEPS:
            lengths = [length * each.drafts_hold for length, each in zip(lengths, sequences, strict=True)]
        if not all(lengths):
            return self._with_probes(choice, lengths)
        return self._with_longer(choice) if step % TRY_STEPS == TRY_STEPS // 2 else lengths

    def _choose(self, sequences: abc.Sequence[Sequence], num_rows: int, rates: Rates) -> ChosenLengths:
        price = self._price_of(len(sequences), num_rows, rates) if self._is_scored else None
        odds = [self.odds(sequence) for sequence in sequences]
        lengths, gain = self._paying(odds, num_rows, rates)
        every = self._probe_every(len(sequences), num_rows, rates)
        return ChosenLengths(sequences, num_rows, rates, price, odds, lengths, gain, every)

    def _price_of(self, count: int, num_rows: int, rates: Rates) -> SureDrafts:
        """Prices, in tokens that a step without drafts makes in the same time: of a row, and of verification itself,
        which takes some time however few rows there are. The time of a row is the least of those by which steps of
        twice, four times ... as many rows differ: differences of single rows are mostly noise, and if a few rows cost a
        lot, many may cost little."""
        plain_s = rates.decode_s(num_rows)
        most = min(count * self._most, self._most_rows(count, num_rows, rates) - num_rows)
        extra = [num_rows << place for place in range((most // num_rows).bit_length())] or [num_rows]
        took_s = [rates.decode_s(num_rows + rows, min(rows, self._most)) - plain_s for rows in extra]
        row_s = max(min(each_s / rows for each_s, rows in zip(took_s, extra, strict=True)), 0.0)
        further_s = max(took_s[0] - row_s * extra[0], 0.0)
        return SureDrafts(min(row_s * num_rows / plain_s, MOST_ODDS), further_s * num_rows / plain_s)

    def _most_rows(self, count: int, num_rows: int, rates: Rates) -> int:
        """Most rows of a step in which `count` sequences draft: nearly as many as have been served."""
        return max(2 * num_rows, rates.next_rows()) if count > 1 else num_rows + self._most

    def _is_new(self, num_rows: int) -> bool:
        """Whether so few steps of about as many rows were made that their time without drafts is not known."""
        place = factor_place(num_rows, 0)
        self._looks[place] = self._looks.get(place, 0) + 1
        return num_rows > 1 and self._looks[place] <= FIRST_LOOKS

    def _with_longer(self, choice: ChosenLengths) -> list[int]:
        """The lengths with the next longer cap, unless that is expected to lose much."""
        lengths, given = choice.lengths, (choice.num_rows, choice.rates)
        longest = max(lengths)
        cap = min((cap for cap in self._caps if cap > longest), default=longest)
        longer = [cap if length == longest else length for length in lengths]
        best = self._rate(choice.odds, lengths, *given)
        return longer if self._rate(choice.odds, longer, *given) >= TRY_LEAST * best else lengths

    def _with_probes(self, choice: ChosenLengths, lengths: list[int]) -> list[int]:
        """`lengths`, and 1 in the place of a 0 where it is time to look whether drafts pay by now, or where the latest
        one was right, if it pays to have right ones."""
        sequences, num_rows, rates = choice.sequences, choice.num_rows, choice.rates
        every = choice.probe_every if self._early_probes <= 0 else PROBE_STEPS
        due = [each.num_output % every == every - 1 for each in sequences]
        again = [each.drafts_hold for each in sequences]
        if not any(due) and not any(again):
            return lengths
        self._early_probes -= any(is_due and not length for is_due, length in zip(due, lengths, strict=True))
        probe = self._probe
        if self.price is not None and any(due) and not any(lengths):  # shows whether drafts pay
            self.price = SureDrafts(self.price.min_odds, 0.0)
        count = num_rows + probe * sum(again)
        if count / rates.decode_s(count, probe) < GAIN * num_rows / rates.decode_s(num_rows):
            again = [False] * len(sequences)
        return [length or probe * any(why) for length, *why in zip(lengths, due, again, strict=True)]

    def _paying(self, odds: list[float], num_rows: int, rates: Rates) -> tuple[list[int], float]:
        """The lengths with the most tokens per second, zeros if no drafts pay, and by what factor that exceeds the rate
        without drafts."""
        plain = num_rows / rates.decode_s(num_rows)
        found, best = [0] * len(odds), GAIN * plain
        if not self._may_pay(max(odds), len(odds), num_rows, rates):
            return found, 1.0
        most_rows = self._most_rows(len(odds), num_rows, rates)
        for cap in self._caps:
            # A row must bring the tokens that its time brings at the best rate found so far.
            lengths = [min(cap, self._length(each, rates.row_s * best)) for each in odds]
            if num_rows + self._share() * sum(lengths) > most_rows:
                break
            rate = self._rate(odds, lengths, num_rows, rates)
            if rate > best:
                found, best = lengths, rate
            if max(lengths) < cap:
                break
        return found, best / plain

    def _share(self) -> float:
        """Share of the drafts allowed that the drafter makes."""
        return self._made / self._allowed

    def _rate(self, odds: list[float], lengths: list[int], num_rows: int, rates: Rates) -> float:
        """Tokens a second that a step of these lengths is expected to bring."""
        share = self._share()
        gained = share * sum(_expected(*each) for each in zip(odds, lengths, strict=True))
        return (num_rows + gained) / rates.decode_s(num_rows + ceil(share * sum(lengths)), max(lengths))

    def _may_pay(self, odds: float, count: int, num_rows: int, rates: Rates) -> bool:
        """Whether drafts would pay if all sequences had these odds, the best ones. This is computed quickly."""
        least = GAIN * num_rows / rates.decode_s(num_rows)
        return any(
            num_rows + count * _expected(odds, cap) > least * rates.decode_s(num_rows + cap, cap) for cap in self._caps
        )

    def _probe_every(self, count: int, num_rows: int, rates: Rates) -> int:
        """Number of tokens between two probes of a sequence. All sequences are probed in the same step."""
        together, alone = (self._probe_loss(many, num_rows, rates) for many in (count, 1))
        return max(PROBE_STEPS, int(max(together, count * alone) / PROBE_SHARE))

    def _probe_loss(self, count: int, num_rows: int, rates: Rates) -> float:
        """Share of a step's time that is lost if it has probes of `count` sequences. Probes of a scored method are
        expected to be accepted, others to be rejected."""
        rows, plain_s = count * self._probe, rates.decode_s(num_rows)
        right = rows if self._is_scored else 0
        return rates.decode_s(num_rows + rows, self._probe) / plain_s - 1 - MOST_ODDS * right / num_rows

    def _length(self, odds: float, least: float) -> int:
        """Number of drafts that are all accepted with a chance of `least` or more."""
        if odds < least:
            return 0
        return self._most if odds >= 1 or least <= 0 else min(self._most, int(log(least) / log(odds)))


def _expected(odds: float, length: int) -> float:
    """Expected number of accepted drafts, of `length` ones."""
    return float(length) if odds >= 1 else odds * (1 - odds**length) / (1 - odds)


def add_drafts(
    plan: StepPlan, kv: KVCacheManager, lengths: abc.Sequence[int], price: SureDrafts | None, most_rows: int
) -> None:
    """Let decoding sequences draft, at most `lengths` and together at most `most_rows`, with the tokens that are left,
    if drafts are worth their `price`. None is preempted for it."""
    if not any(lengths):
        return
    share = plan.budget // len(plan.draftable)
    for (place, sequence), most in zip(plan.draftable, lengths, strict=True):
        end = sequence.num_tokens + sequence.num_pending  # with the token that this step samples
        count = kv.most_drafts(sequence, min(share, most, sequence.max_len - end, most_rows))
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
        sequence.schedule_drafts(count)
        plan.take(count)
        most_rows -= count
    if plan.drafted and price is not None:
        plan.entries.append(price)
