"""Lengths of drafts: measured times of rows, acceptance odds of a sequence's drafts, and lengths that save time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from tests.examples import examples
from tests.scheduler_rig import Rig
from vllm_lite.engine.scheduling.drafts import (
    EARLY_PROBES,
    FIRST_LOOKS,
    MOST_ODDS,
    PROBE_SHARE,
    PROBE_STEPS,
    DraftLengths,
)
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.rates import Rates, factor_place
from vllm_lite.engine.scheduling.step_cost import EVERY, SELDOM, RowFactors, StepCost
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.control import STEP_ROWS, StepTiming
from vllm_lite.protocol.step import Draft, SchedulerOutput, SureDrafts

MOST = 6


def lengths_of(**options: Any) -> DraftLengths:
    return DraftLengths(Options(8, 64, num_drafts=MOST, **options))


def sequence(right: float = 0.0, wrong: float = 0.0, num_output: int = 0) -> Sequence:
    return cast(
        Sequence, SimpleNamespace(drafts_hold=False, drafts_right=right, drafts_wrong=wrong, num_output=num_output)
    )


def look(lengths: DraftLengths, num_rows: int) -> None:
    """Choose lengths for the first steps of `num_rows` sequences, so that their time without drafts is known."""
    for _ in range(FIRST_LOOKS):
        assert lengths.choose([sequence()] * num_rows, num_rows, Rates(step_s=1.0, row_s=1e-6), 3) == [0] * num_rows


def chosen(lengths: DraftLengths, sequences: list[Sequence], rates: Rates, num_rows: int | None = None) -> list[int]:
    return lengths.choose(sequences, len(sequences) if num_rows is None else num_rows, rates, step=3)


# ---- the time of a step


def took(num_rows: int, most_drafts: int, factor: float = 1.0) -> float:
    return factor * (0.010 + 0.002 * num_rows + (0.003 + 0.001 * most_drafts if most_drafts else 0.0))


STARTED = [StepTiming(rows, drafts, took(rows, drafts)) for rows, drafts in ((1, 0), (2, 1), (5, 4), (8, 0), (16, 1))]
NUMBERS = pytest.approx((0.010, 0.002, 0.003, 0.001), rel=0.02)


def test_costs_follow_the_steps_timed_at_the_start() -> None:
    cost = StepCost(STARTED)
    assert cost.numbers == NUMBERS
    rates = cost.rates(Rates(1.0, 2.0, load_blocks_per_s=3.0))
    assert rates[:2] == (1.0, 2.0)
    assert rates.load_blocks_per_s == 3.0
    assert (rates.step_s, rates.row_s, rates.verify_s, rates.draft_s) == cost.numbers
    assert not any(cost.measure(1, 0, took(1, 0)) for _ in range(300)), "what stays the same is no change"
    assert cost.numbers == NUMBERS


def test_steps_without_drafts_teach_nothing_about_drafts() -> None:
    """Served steps draw, answer and read long contexts, which no step at the start did."""
    cost = StepCost(STARTED)
    for _ in range(200):
        cost.measure(1, 0, took(1, 0) + 0.006)
    step_s, row_s, verify_s, draft_s = cost.numbers
    assert step_s == pytest.approx(0.016, rel=0.1)
    assert (row_s, verify_s, draft_s) == pytest.approx((0.002, 0.003, 0.001), rel=0.25)


@pytest.mark.parametrize("timings", [STARTED, []], ids=["timed", "not timed"])
def test_a_machine_that_becomes_slower_is_followed_and_a_pause_is_not(timings: list[StepTiming]) -> None:
    cost = StepCost(timings)
    for place in range(100):
        cost.measure(1 + place % 5, place % 5, took(1 + place % 5, place % 5))
    known = sum(cost.numbers)
    cost.measure(3, 2, 5.0)
    for _ in range(3):
        cost.measure(1, 0, took(1, 0))
    assert sum(cost.numbers) < 1.5 * known, "one step that waited for something else"
    for place in range(900):
        cost.measure(1 + place % 5, place % 5, took(1 + place % 5, place % 5, factor=3.0))
    rates = cost.rates(Rates())
    for drafts in range(5):
        assert rates.decode_s(1 + drafts, drafts) == pytest.approx(took(1 + drafts, drafts, 3.0), rel=0.1)


def test_numbers_that_stay_are_seldom_solved_for_until_there_are_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, solved = StepCost(STARTED), list[int]()
    solve = cost._solve
    monkeypatch.setattr(cost, "_solve", lambda: (solved.append(1), solve())[1])  # type: ignore[func-returns-value]
    for _ in range(640):
        cost.measure(1, 0, took(1, 0))
    assert 640 // SELDOM <= len(solved) < 640 // SELDOM + 4
    solved.clear()
    for _ in range(2 * EVERY):
        cost.measure(5, 4, took(5, 4))
    assert len(solved) == 2
    for _ in range(4 * SELDOM):
        cost.measure(1, 0, 2 * took(1, 0))
    assert cost.rates(Rates()).decode_s(1) == pytest.approx(2 * took(1, 0), rel=0.1), (
        "a change is followed all the same"
    )


def test_the_weights_of_many_steps_do_not_overflow() -> None:
    cost = StepCost(STARTED)
    for place in range(40_000):  # 1 / 0.98 to this power is no float any more
        cost.measure(1 + place % 5, place % 5, took(1 + place % 5, place % 5, factor=2.0))
    assert cost.rates(Rates()).decode_s(5, 4) == pytest.approx(took(5, 4, 2.0), rel=0.05)


def test_steps_of_the_same_rows_show_nothing_where_none_was_tried() -> None:
    cost = StepCost()
    assert not any(cost.measure(4, 0, 0.01) for _ in range(100))
    assert cost.numbers == (0.0, 0.0, 0.0, 0.0)


def test_measured_times_survive_a_change_of_the_base_costs() -> None:
    factors, features = RowFactors(), (1.0, 5.0, 1.0, 4.0)
    for _ in range(80):
        factors.learn(features, 0.06, (0.010, 0.002, 0.0, 0.0))
    place = factor_place(5, 4)
    assert factors.means()[place] * 0.020 == pytest.approx(0.06, rel=0.1)
    factors.rebase((0.010, 0.002, 0.0, 0.0), (0.030, 0.004, 0.0, 0.0))
    assert factors.means()[place] * 0.050 == pytest.approx(0.06, rel=0.1)
    assert factors.means()[factor_place(5, 0)] == 1.0, "of steps without drafts nothing is known"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8), st.floats(1e-5, 1.0)), max_size=60), st.booleans())
def test_whatever_is_measured_a_row_takes_time_and_nothing_less_than_none(
    steps: list[tuple[int, int, float]], is_timed: bool
) -> None:
    cost = StepCost(STARTED if is_timed else ())
    for num_rows, most_drafts, took_s in steps:
        cost.measure(num_rows + most_drafts, most_drafts, took_s)
    assert min(cost.numbers) >= 0
    assert cost.numbers[1] > 0 or not any(cost.numbers)


# ---- the odds


def test_odds_follow_the_sequence_and_begin_with_those_of_all() -> None:
    lengths = lengths_of()
    good, bad, new = sequence(), sequence(), sequence()
    for _ in range(30):
        lengths.learn(good, 4, 5)
        lengths.learn(bad, 4, 1)
    assert lengths.odds(good) > 0.9
    assert lengths.odds(bad) < 0.2
    assert lengths.odds(bad) < lengths.odds(new) < lengths.odds(good)
    before = lengths.odds(good)
    lengths.learn(good, 0, 1)
    assert lengths.odds(good) == before, "nothing was drafted"


def test_drafts_behind_a_wrong_one_say_nothing() -> None:
    lengths, each = lengths_of(), sequence()
    lengths.learn(each, 6, 3)  # two right, the third wrong
    assert (each.drafts_right, each.drafts_wrong) == (2.0, 1.0)
    lengths.learn(each, 2, 3)
    assert each.drafts_right == pytest.approx(3.8)
    assert each.drafts_wrong == pytest.approx(0.9)


# ---- lengths that save time


def test_rows_that_are_free_are_all_taken_and_dear_ones_only_by_sure_drafts() -> None:
    lengths = lengths_of()
    sure, even, bad = sequence(50, 0.01), sequence(10, 10), sequence(0.1, 20)
    free, dear, medium = Rates(step_s=0.01, row_s=1e-6), Rates(step_s=0.0, row_s=0.01), Rates(step_s=0.008, row_s=0.002)
    assert chosen(lengths, [sure], free) == [MOST]
    assert chosen(lengths, [even], free) == [MOST]
    assert chosen(lengths, [even], dear) == [0], "each row takes as long as a step of its own"
    assert chosen(lengths, [bad], medium) == [0]
    (one,), (more,) = chosen(lengths, [even], medium), chosen(lengths, [sure], medium)
    assert 0 < one < more


def test_beside_many_rows_fewer_drafts_pay() -> None:
    """A draft's row takes time from all streams of the step."""
    lengths, rates = lengths_of(), Rates(step_s=0.008, row_s=0.001)
    look(lengths, 32)
    alone = chosen(lengths, [sequence(8, 4)], rates)[0]
    crowd = chosen(lengths, [sequence(8, 4)] * 32, rates)
    assert alone > crowd[0]
    assert len(set(crowd)) == 1


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), min_size=1, max_size=12),
    st.floats(0, 0.02),
    st.floats(1e-6, 0.02),
    st.integers(0, 20),
    st.floats(0, 0.02),
    st.floats(0, 0.02),
)
def test_chosen_lengths_are_never_expected_to_be_slower(
    counts: list[tuple[float, float]], step_s: float, row_s: float, others: int, verify_s: float, draft_s: float
) -> None:
    lengths, sequences = lengths_of(), [sequence(*each) for each in counts]
    rates, num_rows = Rates(step_s=step_s, row_s=row_s, verify_s=verify_s, draft_s=draft_s), len(sequences) + others
    taken = chosen(lengths, sequences, rates, num_rows)
    gained = sum(
        sum(lengths.odds(each) ** place for place in range(1, length + 1))
        for each, length in zip(sequences, taken, strict=True)
    )
    with_drafts_s = rates.decode_s(num_rows + sum(taken), max(taken))
    assert (num_rows + gained) / with_drafts_s >= num_rows / rates.decode_s(num_rows) * (1 - 1e-9)
    assert all(0 <= length <= MOST for length in taken)


def test_drafts_that_do_not_pay_are_tried_again() -> None:
    lengths, rates = lengths_of(), Rates(step_s=0.001, row_s=0.01)
    every = int(0.01 / 0.011 / PROBE_SHARE)
    taken = [chosen(lengths, [sequence(0.1, 20, place)], rates)[0] for place in range(2 * every)]
    assert sum(taken) == EARLY_PROBES + 2, "so rarely that it does not show"
    assert sum(taken[: EARLY_PROBES * PROBE_STEPS]) == EARLY_PROBES, "times that the start has wrong come out soon"
    cheap = Rates(step_s=1.0, row_s=0.001, verify_s=0.05)
    taken = [chosen(lengths, [sequence(0.1, 200, place)], cheap)[0] for place in range(2 * PROBE_STEPS)]
    assert sum(taken) in (2, 4)


def test_a_right_probe_is_followed_by_another_while_right_drafts_pay() -> None:
    """Odds that begin too low are made up for in a few tokens."""
    rates, dear = Rates(step_s=0.01, row_s=0.001, draft_s=0.004), Rates(step_s=0.01, row_s=0.001, draft_s=0.01)
    lengths, each = lengths_of(), sequence(0.0, 6.0, num_output=PROBE_STEPS)
    assert chosen(lengths, [each], rates) == [0]
    for _ in range(4):
        lengths.learn(each, 1, 2)
        assert chosen(lengths, [each], rates) == [1]
        assert chosen(lengths, [each], dear) == [0]
    lengths.learn(each, 1, 1)
    assert chosen(lengths, [each], rates) == [0], "a wrong one is the last"


def test_a_choice_holds_until_drafts_were_asked_for_or_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, each, rates = lengths_of(draft_method="suffix"), sequence(0.1, 20), Rates(step_s=0.01, row_s=0.01)
    made = list[int]()
    choose = lengths._choose
    monkeypatch.setattr(lengths, "_choose", lambda *args: (made.append(1), choose(*args))[1])  # type: ignore[func-returns-value]

    def choices(sequences: list[Sequence], rates: Rates) -> int:
        made.clear()
        for _ in range(3):
            chosen(lengths, sequences, rates, num_rows=1)
            lengths.learn_share(0, 0)
            lengths.learn(each, 0, 1)
        return len(made)

    assert choices([each], rates) == 1
    assert choices([each], rates) == 0
    lengths.learn_share(4, 0)
    assert choices([each], rates) == 1
    lengths.learn(each, 4, 5)
    assert choices([each], rates) == 1
    assert choices([each], rates._replace(row_s=0.02)) == 1
    assert choices([sequence(20, 0.1)], rates) == 1


def test_where_drafts_pay_a_longer_length_is_tried_unless_it_loses_much() -> None:
    """The time measured at startup may be wrong, so a longer length is tried now and then."""
    lengths, sure = lengths_of(), [sequence(50, 0.01)]
    place = factor_place(1 + 5 + 1, MOST)
    assert place > factor_place(1 + 5, 5)
    for factor, taken in ((1.5, {5, MOST}), (3.0, {5})):
        factors = tuple(factor if at == place else 1.0 for at in range(28))
        rates = Rates(step_s=0.01, row_s=0.0001, row_factors=factors)
        found = [lengths.choose(sure, 1, rates, step)[0] for step in range(64)]
        assert set(found) == taken
        assert found.count(MOST) in (0, 2)


def test_only_the_longest_are_tried_longer_and_looks_without_drafts_take_no_trial() -> None:
    lengths, mixed = lengths_of(), [sequence(50, 5.0), sequence(14, 6)]
    rates = Rates(step_s=0.02, row_s=0.008, known_rows=MOST * 2)
    look(lengths, 2)
    found = [tuple(lengths.choose(mixed, 2, rates, step)) for step in range(64)]
    (longest, other), (longer, beside) = chosen(lengths, mixed, rates), found[16]
    assert 0 < other == beside < longest < longer
    assert (found.count((longest, other)), found.count((longer, other)), found.count((0, 0))) == (60, 2, 2)


def test_several_sequences_draft_more_only_once_steps_of_nearly_as_many_rows_were_served() -> None:
    """Rows seem free, but times measured at startup for so many rows are of one sequence, or missing."""
    lengths, sure, free = lengths_of(), [sequence(50, 0.01)] * 8, Rates(step_s=0.01, row_s=1e-6)
    look(lengths, 8)
    taken = [sum(chosen(lengths, sure, free._replace(known_rows=rows))) for rows in (0, 16, 24, 32, 48)]
    assert taken == [8, 16, 24, 40, 6 * 8]
    assert chosen(lengths, sure[:1], free) == [MOST], "one sequence has few rows, and the start timed them"


def test_times_that_the_start_has_wrong_are_wrong_of_all_steps_with_drafts() -> None:
    """Otherwise each number of rows would be tried before it is known to be as dear as the others."""
    cost = StepCost([StepTiming(rows, rows - 1, took(rows, rows - 1)) for rows in (1, 2, 4, 8, 16)])
    assert cost.measure(8, 7, 2 * took(8, 7)), "a step of more rows than any before is learned from at once"
    for _ in range(3):
        cost.measure(8, 7, 2 * took(8, 7))
        cost.measure(1, 0, took(1, 0))
    rates = cost.rates(Rates())
    assert rates.known_rows == 8
    for rows in (2, 4, 16):
        assert rates.decode_s(rows, rows - 1) == pytest.approx(2 * took(rows, rows - 1), rel=0.35)
    assert rates.decode_s(1) == pytest.approx(took(1, 0), rel=0.1)


def test_where_little_is_found_several_sequences_search_rarely_and_continue_after_right_drafts() -> None:
    lengths, sure = lengths_of(draft_method="suffix"), [sequence(50, 0.01, place) for place in range(4)]
    free = Rates(step_s=0.01, row_s=1e-6)
    look(lengths, 4)
    assert all(all(lengths.choose(sure, 4, free, step)) for step in range(1, 5))
    for _ in range(300):
        lengths.learn_share(100, 5)
    sure[2].drafts_hold = True
    asked = [[length > 0 for length in lengths.choose(sure, 4, free, step)] for step in range(1, 9)]
    assert asked == [[False, False, True, False]] * 7 + [[True] * 4]
    assert all(lengths.choose(sure[:1], 1, free, step)[0] for step in range(1, 5)), "a single search takes little"


def price(lengths: DraftLengths) -> SureDrafts:
    assert lengths.price is not None
    return lengths.price


def test_the_price_of_a_row_is_its_time_in_tokens_of_a_plain_step() -> None:
    dear, cheap = Rates(step_s=0.004, row_s=0.001), Rates(step_s=0.004, row_s=1e-6)
    lengths = lengths_of(draft_method="suffix")
    assert lengths.price is None
    chosen(lengths, [sequence()], cheap)
    assert price(lengths).min_odds < 0.001
    look(lengths, 8)
    chosen(lengths, [sequence()] * 8, dear)
    assert price(lengths) == SureDrafts(pytest.approx(8 * 0.001 / 0.012), pytest.approx(0.0))  # type: ignore[arg-type]
    chosen(lengths, [sequence()], Rates(step_s=0.0, row_s=0.01))
    assert price(lengths).min_odds == MOST_ODDS, "more than a token: nothing is as sure"
    other = lengths_of(draft_method="self")
    chosen(other, [sequence()], dear)
    assert other.price is None, "it cannot tell"


def test_drafts_are_never_paid_for() -> None:
    """Steps with drafts seem to take less time than those without: by noise."""
    factors = (1.5,) * len(STEP_ROWS) + (1.0,) * len(STEP_ROWS)
    lengths = lengths_of(draft_method="suffix")
    chosen(lengths, [sequence()], Rates(step_s=0.009, row_s=0.001, row_factors=factors))
    assert price(lengths) == SureDrafts(0.0, 0.0)


def test_verifying_has_a_price_that_probes_do_not_pay() -> None:
    """The cheapest row is the last of several, and the first ones take more."""
    lengths, rates = lengths_of(draft_method="suffix"), Rates(step_s=0.009, row_s=0.001, verify_s=0.003)
    assert chosen(lengths, [sequence(50, 0.01)], rates) == [MOST]
    row = (0.003 + 4 * 0.001) / 4 / 0.01
    assert price(lengths) == SureDrafts(pytest.approx(row), pytest.approx(0.4 - row))  # type: ignore[arg-type]
    assert chosen(lengths, [sequence(0.1, 20, PROBE_STEPS - 1)], rates) == [4]
    assert price(lengths) == SureDrafts(pytest.approx(row), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "most"), [("self", 3), ("mtp", 1)])
def test_the_models_own_drafts_are_taken_to_be_right_at_first(method: str, most: int) -> None:
    rates = Rates(step_s=0.040, row_s=0.0006, verify_s=0.001, draft_s=0.011)
    assert chosen(lengths_of(draft_method=method), [sequence()], rates) == [most]


def test_factors_of_the_start_count_until_steps_show_others() -> None:
    """Rows cost nothing up to a jump, which the four numbers cannot say."""
    curve = {1: 0.04, 2: 0.052, 4: 0.075, 8: 0.122, 12: 0.172, 16: 0.245}
    cost = StepCost([StepTiming(rows, rows - 1, took_s) for rows, took_s in curve.items()])
    for rows, took_s in curve.items():
        assert cost.rates(Rates()).decode_s(rows, rows - 1) == pytest.approx(took_s, rel=1e-6)
    for _ in range(100):
        cost.measure(12, 11, 1.3 * curve[12])
        cost.measure(1, 0, 1.3 * curve[1])
    for rows, took_s in curve.items():
        assert cost.rates(Rates()).decode_s(rows, rows - 1) == pytest.approx(1.3 * took_s, rel=0.12), rows


def test_steps_as_slow_as_at_the_start_change_no_cost() -> None:
    """The numbers do not follow a jump that the factors have."""
    jump = [StepTiming(rows, rows - 1, 0.04 + 0.001 * rows + 0.2 * (rows > 12)) for rows in (1, 2, 4, 8, 12, 16)]
    cost = StepCost(jump)
    for _ in range(200):
        cost.measure(16, 15, jump[-1].took_s)
    for rows, drafts, took_s in map(astuple, jump):
        assert cost.rates(Rates()).decode_s(rows, drafts) == pytest.approx(took_s, rel=1e-6)


def test_fixed_lengths_and_unknown_rates() -> None:
    assert chosen(lengths_of(adaptive_drafts=False), [sequence(0, 20)], Rates(step_s=0.0, row_s=1.0)) == [MOST]
    forced = DraftLengths(Options(8, 64, num_forced=3))
    assert forced.choose([sequence(0, 20)], 1, Rates(step_s=0.0, row_s=1.0), 1) == [3]
    unknown = [lengths_of().choose([sequence()], 1, Rates(), step)[0] for step in range(2 * (MOST + 1))]
    assert sorted(set(unknown)) == list(range(MOST + 1)), "steps of different rows show their time"


def test_the_scheduler_drafts_less_where_rows_are_dear() -> None:
    """The same tokens either way."""
    drafted, outputs = [], []
    for row_s in (1e-6, 0.05):
        rig = Rig(num_blocks=60, num_drafts=4, max_num_batched_tokens=64, adaptive_drafts=True)
        rig.scheduler.measured(Rates(step_s=0.01, row_s=row_s))
        rig.add("a", [1, 2, 3], max_tokens=40)
        rig.drain()
        drafted.append(rig.worker.num_drafted)
        outputs.append(rig.output("a"))
    assert outputs[0] == outputs[1]
    assert drafted[0] > 3 * drafted[1]


@pytest.mark.parametrize("method", ["suffix", "self"])
def test_each_step_with_drafts_has_one_price(method: str) -> None:
    options = {"num_drafts": 4, "draft_method": method, "adaptive_drafts": True}
    rig = Rig(num_blocks=90, max_num_batched_tokens=64, **options)  # type: ignore[arg-type]
    rig.scheduler.measured(Rates(step_s=0.01, row_s=0.0005))
    for index in range(3):
        rig.add(f"r{index}", [1, 2, index], max_tokens=40)
    found: list[tuple[int, list[SureDrafts]]] = []

    def see(step: SchedulerOutput) -> None:
        sure = [entry for entry in step.entries if isinstance(entry, SureDrafts)]
        found.append((sum(isinstance(entry, Draft) for entry in step.entries), sure))

    rig.watch(see)
    rig.drain()
    assert {count for count, _ in found} >= {0, 3}
    assert all(len(sure) == (method == "suffix" and count > 0) for count, sure in found)
    assert all(0 < each.min_odds < MOST_ODDS for _, sure in found for each in sure)


def test_behind_a_right_draft_no_more_are_asked_for_once_none_is_found() -> None:
    rig = Rig(num_blocks=60, num_drafts=4, max_num_batched_tokens=64, adaptive_drafts=True)
    rig.scheduler.measured(Rates(step_s=0.01, row_s=0.004))
    asked: list[int] = []

    def find_none(history: object, max_drafts: int) -> list[int]:
        asked.append(max_drafts)
        return []

    rig.worker._draft = find_none  # type: ignore[method-assign]
    request = rig.add("a", [1, 2, 3], max_tokens=14)
    rig.step()
    (each,) = request.sequences
    each.drafts_wrong, each.drafts_hold = 20.0, True
    rig.drain()
    assert asked.count(1) == 1
    assert asked.count(0) == len(asked) - 1


def test_without_adaption_every_entry_takes_the_most() -> None:
    rig = Rig(num_blocks=60, num_drafts=4, max_num_batched_tokens=64, adaptive_drafts=False)
    rig.add("a", [1, 2, 3], max_tokens=20)
    found: list[int] = []
    rig.watch(lambda step: found.extend(entry.max_drafts for entry in step.entries if isinstance(entry, Draft)))
    rig.drain()
    assert len(found) > 4
    assert set(found[:-4]) == {4}, "but for the end of the sequence"


def test_a_step_without_rows_says_nothing() -> None:
    """Such a step is expected to take no time if a step has no fixed cost."""
    cost = StepCost()
    cost.numbers = (0.0, 0.01, 0.0, 0.0)
    assert not cost.measure(0, 0, 0.5)
    assert cost.factors == StepCost().factors
