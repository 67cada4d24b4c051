"""Drafts on a simulated clock: whatever rows cost and however good drafts are, steps bring no fewer tokens.

The machine's time by rows is no straight line, as the numbers of step_cost.py have it: rows are free up to a point,
cost a stair at a time, or a jump where another kernel begins. Each step is held against the same step without drafts.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_lite.engine.scheduling.drafts import FIRST_LOOKS, DraftLengths
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.scheduling.step_cost import StepCost
from vllm_lite.protocol.control import STEP_ROWS, StepTiming
from vllm_lite.protocol.step import SureDrafts

NUM_TOKENS, NUM_ANSWERS, CROWD, NOISE = 160, 3, 8, 0.05
SURE = 0.97
"""The odds of drafts that their drafter knows to be sure."""

CURVES: dict[str, Callable[[int], float]] = {
    "line": lambda rows: 0.6 + 0.4 * rows,
    "some are free": lambda rows: 1.0 + 0.01 * rows + 0.05 * max(0, rows - 6),
    "stairs": lambda rows: 1.0 + 0.35 * ((rows - 1) // 4),
    "jump at 9": lambda rows: 1.0 + 0.02 * rows + 0.8 * (rows > 8),
    "jump at 13": lambda rows: 1.0 + 0.015 * rows + 0.7 * (rows > 12),
    "jump at 33": lambda rows: 1.0 + 0.02 * rows + 1.0 * (rows > 32),
    "dear up to 8": lambda rows: 1.06 * min(rows, 8) + 0.65 * max(0, rows - 8),
    "experts": lambda rows: 16.0 * (1.0 - 0.94**rows),
}


class Case(NamedTuple):
    curve: str
    num_seqs: int
    odds: tuple[float, ...]
    """Chances of a draft, which change every so often."""
    most: int = 8
    found: float = 1.0
    """The share of the steps in which the drafter has drafts at all."""
    draft: float = 0.0
    """Time of a draft, as a share of a step's time."""
    least: float = 0.98
    told: float = 1.0
    """Factor by which the times measured at startup for steps with drafts are wrong."""
    method: str = ""
    search: float = 0.0
    """Time of a search for drafts, successful or not, as a share of a step's time."""
    sure: float = 0.0
    """The share of sure drafts. Drafters with a score make the others only if their odds are asked for."""


class Machine:
    """Steps of a case, and the time they take."""

    def __init__(self, case: Case) -> None:
        self.case, self.random = case, random.Random(1)
        self.took = self.plain = 0.0

    def time(self, num_rows: int, most_drafts: int) -> float:
        curve = CURVES[self.case.curve]
        share = 0.05 + self.case.draft * most_drafts if most_drafts else 0.0
        return 0.01 * (curve(num_rows) + share * curve(self.case.num_seqs))

    def timings(self) -> list[StepTiming]:
        alone = [(rows, rows - 1) for rows in STEP_ROWS if rows <= self.case.most] + [
            (1 + self.case.most, self.case.most)
        ]
        return [
            StepTiming(*each, self.time(*each) * (self.case.told if each[1] else 1.0))
            for each in [*alone, (CROWD, 0), (2 * CROWD, 1)]
        ]

    def answer(self, lengths: DraftLengths, cost: StepCost) -> None:
        """Generate an answer of each sequence."""
        case = self.case
        sequences: list[Any] = [
            SimpleNamespace(  # as a Sequence
                drafts_hold=False, drafts_right=0.0, drafts_wrong=0.0, num_output=1
            )
            for _ in range(case.num_seqs)
        ]
        step = 0
        while live := [each for each in sequences if each.num_output < NUM_TOKENS]:
            step += 1
            allowed = lengths.choose(live, len(live), cost.rates(Rates()), step)
            drafted = self._paying(list(zip(live, allowed, strict=True)), lengths.price or SureDrafts(0.0, 0.0))
            for sequence, most in zip(live, allowed, strict=True):
                sequence.drafts_hold &= not most  # learn() sets it again if all of its drafts were right
            lengths.learn_share(sum(allowed), sum(drafted))
            given = sum(self._verify(lengths, *each) for each in zip(live, drafted, strict=True))
            shape = len(live) + sum(drafted), max(drafted)
            step_s = self.time(*shape) + any(allowed) * case.search * self.time(len(live), 0)
            self.took += step_s
            self.plain += given * self.time(len(live), 0) / len(live)
            took_s = step_s * (1 + abs(self.random.gauss(0, NOISE)))
            if any(drafted) or not any(allowed) or took_s < cost.rates(Rates()).decode_s(len(live)):  # as EngineCore
                cost.measure(*shape, took_s)

    def _paying(self, asked: list[tuple[Any, int]], price: SureDrafts) -> list[int]:
        """The numbers of drafts, where their drafter knows whether they are sure, and what they are worth together."""
        made = [self._make(*each, price.min_odds) for each in asked]
        gain = 0.0
        for (sequence, _), count in zip(asked, made, strict=True):
            odds = SURE if sequence.is_sure else self._odds(sequence)
            gain += sum(odds**place - price.min_odds for place in range(1, count + 1))
        return made if gain >= price.min_gain else [0] * len(made)

    def _make(self, sequence: Any, allowed: int, min_odds: float) -> int:
        is_found, sequence.is_sure = (self.random.random() < share for share in (self.case.found, self.case.sure))
        if not is_found or (min_odds > self._odds(sequence) and not sequence.is_sure):
            return 0
        return min(allowed, NUM_TOKENS - int(sequence.num_output) - 1)

    def _odds(self, sequence: Any) -> float:
        return self.case.odds[int(sequence.num_output) // 40 % len(self.case.odds)]

    def _verify(self, lengths: DraftLengths, sequence: Any, drafted: int) -> int:
        odds, num_right = SURE if sequence.is_sure else self._odds(sequence), 0
        while num_right < drafted and self.random.random() < odds:
            num_right += 1
        lengths.learn(sequence, drafted, 1 + num_right)
        sequence.num_output += 1 + num_right
        return 1 + num_right


def gain(case: Case) -> float:
    """Tokens a second, as a multiple of those without drafts."""
    machine = Machine(case)
    options = Options(64, 512, num_drafts=case.most, draft_method=case.method)
    lengths, cost = DraftLengths(options), StepCost(machine.timings())
    for _ in range(NUM_ANSWERS):
        machine.answer(lengths, cost)
    return machine.plain / machine.took


CASES = (
    Case("line", 8, (0.5,)),
    Case("some are free", 8, (0.9, 0.05)),
    Case("some are free", 1, (0.05,), least=0.99),
    Case("stairs", 8, (0.7,), found=0.3),
    Case("stairs", 1, (0.85,), most=3, draft=0.33, least=1.3),
    Case("jump at 9", 8, (0.7,), found=0.3),
    Case("jump at 33", 32, (0.7,), found=0.3),
    Case("jump at 33", 32, (0.7,), most=4, found=0.6, least=0.97),
    Case("experts", 1, (0.9, 0.05)),
    Case("experts", 8, (0.6,), most=3, draft=0.3),
    Case("line", 8, (0.5,), told=0.5, least=0.985),
    Case("line", 8, (0.6,), found=0.5, told=0.5, least=0.985),
    Case("stairs", 8, (0.3,), told=0.5, least=0.985),
    Case("stairs", 8, (0.6,), found=0.5, told=0.5, least=0.985),
    Case("some are free", 8, (0.3,), told=0.5, least=0.985),
    Case("jump at 9", 8, (0.6,), found=0.5, told=0.5, least=0.985),
    Case("jump at 33", 32, (0.3,), told=0.5, least=0.985),
    Case("experts", 8, (0.6,), found=0.5, told=0.5, least=0.985),
    Case("dear up to 8", 8, (0.3,), found=0.7, sure=0.05, least=0.985, method="suffix"),
    Case("dear up to 8", 8, (0.3,), found=0.7, sure=0.05, least=0.985, method="suffix", told=0.5),
    Case("dear up to 8", 8, (0.3,), found=0.7, sure=0.4, least=1.02, method="suffix"),
    Case("dear up to 8", 8, (0.3,), found=0.98, sure=0.95, least=1.1, method="suffix"),
    Case("dear up to 8", 32, (0.3,), found=0.7, sure=0.4, least=0.985, method="suffix"),
    Case("line", 8, (0.3,), found=0.7, sure=0.4, least=0.985, method="suffix"),
    Case("experts", 8, (0.3,), found=0.7, sure=0.4, least=0.985, method="suffix"),
    Case("experts", 1, (0.3,), found=0.7, sure=0.4, least=0.985, method="suffix"),
    Case("some are free", 1, (0.5,), found=0.7, sure=0.4, least=1.3, method="suffix"),
    Case("dear up to 8", 1, (0.2,), found=0.9, sure=0.3, search=0.05, least=0.985, method="suffix"),
    Case("dear up to 8", 1, (0.2,), found=0.3, sure=0.02, search=0.05, least=0.99, method="suffix"),
    Case("dear up to 8", 8, (0.2,), found=0.3, sure=0.3, search=0.05, least=0.99, method="suffix"),
    Case("some are free", 1, (0.2,), found=0.9, sure=0.05, search=0.02, least=0.99, method="suffix"),
    Case("jump at 33", 8, (0.9,), found=0.01, search=0.1, least=0.985),
    Case("jump at 33", 8, (0.6,), found=0.5, told=2.0, least=1.15),
    Case("jump at 33", 8, (0.5,), told=0.5, least=1.2),
    Case("jump at 13", 32, (0.6,), found=0.5, told=0.5, least=1.05),
    Case("some are free", 1, (0.95,), least=3.0),
    Case("jump at 13", 1, (1.0,), most=15, draft=0.28, least=2.5, method="self"),
    Case("jump at 13", 1, (1.0,), most=15, draft=0.28, least=2.2, method="self", told=2.0),
    Case("jump at 13", 1, (1.0,), most=15, draft=0.28, least=2.2, method="self", told=0.5),
    Case("jump at 13", 1, (0.9,), most=15, draft=0.28, least=1.7, method="self"),
    Case("jump at 13", 1, (0.0, 1.0), most=15, draft=0.28, least=1.03, method="self"),
    Case("jump at 13", 1, (0.05,), most=15, draft=0.28, least=0.97, method="self"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.curve}, {case.num_seqs}, {case.odds}, {case.told}")
def test_steps_bring_no_fewer_tokens_than_without_drafts(case: Case) -> None:
    assert gain(case) >= case.least


def test_sure_drafts_are_found_again_where_others_have_lost() -> None:
    """A question that is asked again, after others that few drafts were right for."""
    case = Case("dear up to 8", 8, (0.3,), found=0.7, sure=0.05, method="suffix")
    machine = Machine(case)
    own = DraftLengths(Options(64, 512, num_drafts=8, draft_method="suffix")), StepCost(machine.timings())
    for _ in range(NUM_ANSWERS):
        machine.answer(*own)
    machine.case, machine.took, machine.plain = case._replace(found=0.98, sure=0.95), 0.0, 0.0
    for _ in range(2):
        machine.answer(*own)
    assert machine.plain / machine.took > 1.1


def test_a_drafter_that_finds_little_is_expected_to() -> None:
    """Drafts that it may make are not yet rows of a step."""
    lengths = DraftLengths(Options(64, 512, num_drafts=8))
    sequences: list[Any] = [
        SimpleNamespace(drafts_hold=False, drafts_right=6.0, drafts_wrong=4.0, num_output=5) for _ in range(8)
    ]
    for _ in range(FIRST_LOOKS):
        lengths.choose(sequences, 8, Rates(step_s=0.01, row_s=1e-5), 3)
    dear = Rates(step_s=0.01, row_s=1e-5, row_factors=tuple([1.0] * 14 + [1.0] * 6 + [3.0] * 8))  # from 9 rows on
    assert not any(lengths.choose(sequences, 8, dear, 3))
    cheap = dear._replace(row_factors=tuple([1.0] * 14 + [1.0] * 7 + [3.0] * 7))  # from 13 rows on
    for _ in range(100):
        lengths.learn_share(64, 2)
    assert all(lengths.choose(sequences, 8, cheap, 3))


def test_once_in_a_while_nothing_is_drafted_unless_drafts_bring_much() -> None:
    lengths = DraftLengths(Options(64, 512, num_drafts=4))
    some: list[Any] = [SimpleNamespace(drafts_hold=False, drafts_right=3.0, drafts_wrong=4.0, num_output=5)]
    rates = Rates(step_s=0.01, row_s=0.001)
    taken = [lengths.choose(some, 1, rates, step)[0] for step in range(1, 65)]
    assert taken.count(0) == 2
    sure: list[Any] = [SimpleNamespace(drafts_hold=False, drafts_right=30.0, drafts_wrong=0.1, num_output=5)]
    assert all(lengths.choose(sure, 1, rates, step)[0] for step in range(1, 65))
