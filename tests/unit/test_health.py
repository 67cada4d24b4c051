"""Who failed first: every kind of evidence against every other, in both orders."""

from collections.abc import Callable
from itertools import combinations

import pytest

from vllm_lite.errors import EngineDeadError, ModelError
from vllm_lite.executor.base import Failure
from vllm_lite.executor.health import RankHealth, first_failure, slowest
from vllm_lite.protocol.control import Failed

NOW_S, LIMIT_S = 1000.0, 20.0
Change = Callable[[RankHealth], None]


def healthy(rank: int) -> RankHealth:
    health = RankHealth(rank)
    health.pid, health.is_loaded, health.progress = 4000 + rank, True, 50
    health.last_heard_s = health.last_progress_s = NOW_S
    return health


def group(*changes: Change, world: int = 0) -> list[RankHealth]:
    """A rank for each change, made to it, and more that are well, up to `world`."""
    ranks = [healthy(rank) for rank in range(max(world, len(changes)))]
    for rank, change in zip(ranks, changes, strict=False):
        change(rank)
    return ranks


def judge(ranks: list[RankHealth], *, has_work: bool = True, first_to_abort: int | None = None) -> Failure | None:
    return first_failure(ranks, NOW_S, LIMIT_S, has_work=has_work, first_to_abort=first_to_abort)


# ---- states of a rank


def well(_rank: RankHealth) -> None:
    pass


def failed(rank: RankHealth) -> None:
    rank.on_failed(Failed(rank.rank, 1, "ValueError", "a bug", False), NOW_S)


def died(rank: RankHealth) -> None:
    rank.on_ended("exit status 1", NOW_S)


def was_killed(rank: RankHealth) -> None:
    rank.on_ended("killed by SIGKILL", NOW_S)


def unreachable(rank: RankHealth) -> None:
    rank.on_unreachable(NOW_S)


def silent(rank: RankHealth) -> None:
    rank.last_heard_s = rank.last_progress_s = NOW_S - LIMIT_S - 1


def stuck(rank: RankHealth) -> None:
    rank.last_progress_s = NOW_S - LIMIT_S - 1


def waiting(rank: RankHealth) -> None:
    """Make a rank stuck in a wait, which its heartbeats report."""
    stuck(rank)
    rank.is_waiting = True


def waited_for(other: int | None) -> Change:
    def change(rank: RankHealth) -> None:
        rank.on_failed(Failed(rank.rank, 1, "RankLostError", "a rank has ended", False, other), NOW_S)
        rank.on_ended("exit status 1", NOW_S)

    return change


WORDS: dict[Change, str] = {
    failed: r"^worker {} failed: ValueError: a bug$",
    died: r"^worker {} \(pid 400{}\) died: exit status 1$",
    unreachable: r"^worker {} cannot be reached any more$",
    silent: r"^worker {} \(pid 400{}\) has been silent for 21 s$",
    stuck: r"^worker {} \(pid 400{}\) is stuck: no layer in 20 s$",
}
"""Messages about a rank, the strongest evidence first."""


def assert_named(failure: Failure | None, rank: int, evidence: Change) -> None:
    assert failure is not None
    assert failure.rank == rank
    with pytest.raises(EngineDeadError, match=WORDS[evidence].format(rank, rank)):
        raise failure.error


# ---- one rank


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("evidence", [failed, died, unreachable, silent], ids=lambda change: change.__name__)
def test_each_evidence_is_enough(evidence: Change, world: int) -> None:
    assert_named(judge(group(evidence, world=world)), 0, evidence)
    assert_named(judge(group(evidence, world=world), has_work=False), 0, evidence)


def test_healthy_ranks_have_no_verdict() -> None:
    assert judge(group(well, well)) is None


def test_silence_before_a_rank_has_loaded_means_nothing() -> None:
    ranks = group(silent)
    ranks[0].is_loaded = False
    ranks[0].progress = 0
    assert judge(ranks, has_work=False) is None


def test_silence_counts_once_weights_are_read() -> None:
    ranks = group(silent)
    ranks[0].is_loaded, ranks[0].progress = False, 1
    assert_named(judge(ranks), 0, silent)


def test_a_rank_without_progress_has_failed_only_if_there_is_work() -> None:
    assert_named(judge(group(stuck)), 0, stuck)
    assert judge(group(stuck), has_work=False) is None


def test_bad_input_is_the_users_error_without_a_rank() -> None:
    ranks = group(well, well)
    ranks[1].on_failed(Failed(1, 1, "ConfigError", "too large", True), NOW_S)
    failure = judge(ranks)
    assert failure is not None
    assert (type(failure.error), str(failure.error)) == (ModelError, "too large")


def test_the_first_report_of_a_rank_counts() -> None:
    ranks = group(failed)
    ranks[0].on_failed(Failed(0, 1, "OSError", "in the cleanup", False), NOW_S)
    assert_named(judge(ranks), 0, failed)


# ---- several ranks


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("stronger", "weaker"),
    list(combinations((failed, died, unreachable, silent), 2)),
    ids=lambda change: change.__name__,
)
def test_the_stronger_evidence_is_believed(stronger: Change, weaker: Change, reverse: bool) -> None:
    changes = (weaker, stronger) if reverse else (stronger, weaker)
    assert_named(judge(group(*changes)), changes.index(stronger), stronger)


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("evidence", [failed, died, unreachable], ids=lambda change: change.__name__)
def test_waiting_ranks_are_not_blamed(evidence: Change, culprit: int) -> None:
    """The waiting ranks have reported and ended, which by itself would be stronger evidence."""
    for named in (culprit, None, (culprit + 1) % 3):
        changes: list[Change] = [waited_for(named)] * 3
        changes[culprit] = evidence
        assert_named(judge(group(*changes)), culprit, evidence)


def test_a_rank_that_names_another_one_is_not_the_cause_whatever_its_error_is() -> None:
    ranks = group(well, died)
    ranks[0].on_failed(Failed(0, 1, "OSError", "connection reset", False, 1), NOW_S - 1)
    assert_named(judge(ranks), 1, died)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("evidence", [silent, stuck], ids=lambda change: change.__name__)
def test_a_hung_rank_is_named_and_not_the_one_that_waits_for_it(evidence: Change, reverse: bool) -> None:
    changes = (waiting, evidence) if reverse else (evidence, waiting)
    assert_named(judge(group(*changes)), changes.index(evidence), evidence)


def test_a_rank_that_waits_for_a_working_one_is_healthy() -> None:
    assert judge(group(waiting, well)) is None


def test_a_rank_that_ran_ahead_is_well() -> None:
    """A rank may have ended its step, or hang; as long as another one makes progress, time will show."""
    assert judge(group(stuck, well)) is None


def test_a_rank_stopped_while_it_waited_is_found_by_its_silence() -> None:
    """Both ranks report that they wait, and their limits end at different moments."""
    ranks = group(waiting, waiting)
    ranks[1].last_heard_s = NOW_S - LIMIT_S + 0.4
    failure = judge(ranks)
    assert failure is not None
    assert str(failure.error) == "worker 1 (pid 4001) has been silent for 20 s"


def test_where_all_wait_the_last_one_is_named() -> None:
    ranks = group(waiting, waiting, waiting)
    ranks[1].progress -= 1
    assert_named(judge(ranks), 1, stuck)


def test_the_one_that_waits_least_then_the_last_one_is_the_slowest() -> None:
    ranks = group(waiting, stuck, stuck)
    ranks[0].progress = 1
    ranks[2].progress = 3
    assert slowest(ranks) is ranks[2]


# ---- equals


@pytest.mark.parametrize("evidence", [failed, died, unreachable], ids=lambda change: change.__name__)
def test_equal_evidence_is_decided_by_the_first_abort_then_time_then_progress(evidence: Change) -> None:
    ranks = group(evidence, evidence, evidence)
    ranks[2].progress -= 1
    assert_named(judge(ranks), 2, evidence)
    ranks[1].noticed_s -= 1
    assert_named(judge(ranks), 1, evidence)
    assert_named(judge(ranks, first_to_abort=0), 0, evidence)


def test_the_rank_behind_is_named_of_two_silent_ones() -> None:
    ranks = group(silent, silent)
    ranks[1].progress -= 1
    assert_named(judge(ranks), 1, silent)


# ---- certainty


@pytest.mark.parametrize(
    ("evidence", "is_certain"),
    [(failed, True), (died, False), (was_killed, True), (unreachable, False), (silent, True)],
)
def test_a_failure_that_a_pending_message_may_correct_is_not_certain(evidence: Change, is_certain: bool) -> None:
    failure = judge(group(evidence, world=2))
    assert failure is not None
    assert failure.is_certain is is_certain


def test_a_report_is_not_certain_while_the_memory_names_another_rank() -> None:
    failure = judge(group(failed, world=2), first_to_abort=1)
    assert failure is not None
    assert (failure.rank, failure.is_certain) == (0, False)


# ---- only those that waited have spoken


@pytest.mark.parametrize(("named", "in_memory"), [(2, None), (None, 2), (1, 2)])
def test_the_rank_that_was_waited_for_is_named_though_it_is_dumb(named: int | None, in_memory: int | None) -> None:
    failure = judge(group(waited_for(named), waited_for(named), world=3), first_to_abort=in_memory)
    assert failure is not None
    assert (failure.rank, failure.is_certain) == (2, False)
    assert str(failure.error) == ("worker 2 was lost, and did not say why; worker 0 waited for it: a rank has ended")


def test_a_wait_that_ran_out_is_reported_as_it_is() -> None:
    failure = judge(group(waited_for(None), world=2))
    assert failure is not None
    assert (failure.rank, failure.is_certain) == (0, False)
    assert str(failure.error) == "worker 0 failed: RankLostError: a rank has ended"


def test_a_process_that_is_stopped_before_it_loads_is_silent() -> None:
    """The import of torch may take any time, but a stopped process does not import."""
    rank = RankHealth(0)
    rank.last_heard_s = rank.last_progress_s = NOW_S - 10 * LIMIT_S
    rank.on_looked_at(NOW_S - 9 * LIMIT_S, is_stopped=True)
    rank.on_looked_at(NOW_S - 8 * LIMIT_S, is_stopped=False)
    assert judge([rank], has_work=False) is None
    rank.on_looked_at(NOW_S - LIMIT_S, is_stopped=True)
    rank.on_looked_at(NOW_S, is_stopped=True)
    assert judge([rank], has_work=False) is None
    rank.stopped_s = NOW_S - LIMIT_S - 1
    found = judge([rank], has_work=False)
    assert found is not None
    assert (found.rank, found.cause) == (0, "silent")
    rank.progress = 1  # from here on its heartbeats count
    rank.last_heard_s = rank.last_progress_s = NOW_S
    assert judge([rank], has_work=False) is None
