"""The balance of drafts: when it is spent, and when drafts have credit again."""

from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.scheduling.step_cost import FIRST_STEPS, MOST_STEPS, RESUME_STEPS, SHARE, DraftBalance

NUM_SEQS, PLAIN_S = 8, 0.01


def balance() -> DraftBalance:
    """One that knows what a step takes without drafts."""
    made = DraftBalance()
    made.measure(NUM_SEQS, NUM_SEQS, PLAIN_S, is_drafting=False)
    return made


def until_it_changes(made: DraftBalance, num_tokens: int, took: float, *, is_drafting: bool) -> int:
    """The steps of a kind, each of `took` times PLAIN_S, up to the one that changes whether drafts are made."""
    for count in range(1, 10_000):
        if made.measure(NUM_SEQS, num_tokens, took * PLAIN_S, is_drafting=is_drafting):
            return count
    raise AssertionError("nothing changes")


def test_drafts_that_lose_time_end_and_are_made_again_once_their_share_of_it_has_passed() -> None:
    made = balance()
    assert not made.rates(Rates()).only_probes
    count = until_it_changes(made, NUM_SEQS, 1.25, is_drafting=True)
    assert count - 1 <= FIRST_STEPS / (0.25 - 1.25 * SHARE) <= count
    assert made.rates(Rates()).only_probes
    paused = until_it_changes(made, NUM_SEQS, 1.0, is_drafting=False)
    assert RESUME_STEPS / SHARE <= paused <= (RESUME_STEPS + 0.25) / SHARE + 1
    assert not made.rates(Rates()).only_probes


def test_gains_of_long_ago_pay_for_few_losses() -> None:
    made = balance()
    for _ in range(1000):
        assert not made.measure(NUM_SEQS, 2 * NUM_SEQS, PLAIN_S, is_drafting=True)
    assert until_it_changes(made, NUM_SEQS, 1.5, is_drafting=True) <= 2 * MOST_STEPS + 1


def test_probes_that_gain_end_the_pause() -> None:
    made = balance()
    until_it_changes(made, NUM_SEQS, 2.0, is_drafting=True)
    assert until_it_changes(made, 2 * NUM_SEQS, 1.2, is_drafting=True) <= 4


def test_a_step_that_something_else_delays_ends_no_drafts() -> None:
    made = balance()
    assert not made.measure(NUM_SEQS, NUM_SEQS, 100 * PLAIN_S, is_drafting=True)
    assert not made.measure(NUM_SEQS, NUM_SEQS, 100 * PLAIN_S, is_drafting=False)


def test_a_search_that_finds_no_drafts_costs_its_time() -> None:
    """Whether it finds some shows in the tokens alone."""
    made = balance()
    assert until_it_changes(made, NUM_SEQS, 1.05, is_drafting=True) <= FIRST_STEPS / 0.045 + 1


def test_without_the_time_of_a_step_without_drafts_nothing_is_lost() -> None:
    made = DraftBalance()
    assert not any(made.measure(NUM_SEQS, NUM_SEQS, 9.0, is_drafting=True) for _ in range(100))
    assert not made.measure(0, 0, PLAIN_S, is_drafting=False)
    assert not made.measure(NUM_SEQS, NUM_SEQS, 0.0, is_drafting=False)
    assert not any(made.measure(1, 1, 9.0, is_drafting=True) for _ in range(100)), "each number of rows has its own"


def test_what_a_step_takes_without_drafts_is_followed() -> None:
    made = balance()
    for _ in range(40):
        made.measure(NUM_SEQS, NUM_SEQS, 3 * PLAIN_S, is_drafting=False)
    assert not any(made.measure(NUM_SEQS, NUM_SEQS, 3 * PLAIN_S, is_drafting=True) for _ in range(200))
