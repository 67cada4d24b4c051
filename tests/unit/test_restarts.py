"""Limit of restarts, and the message when it is reached."""

from vllm_lite.runtime.restarts import RestartLimit


def test_the_number_of_restarts_is_limited() -> None:
    limit = RestartLimit(2, window_s=300.0)
    assert limit.allows("killed by SIGKILL", 0.0)
    assert limit.allows("killed by SIGKILL", 1.0)
    assert not limit.allows("killed by SIGKILL", 2.0)


def test_deaths_before_the_window_are_forgotten() -> None:
    limit = RestartLimit(1, window_s=300.0)
    assert limit.allows("a", 0.0)
    assert limit.allows("b", 300.5)
    assert limit.causes == "b"
    assert not limit.allows("c", 600.5)


def test_without_restarts_the_first_death_is_the_last() -> None:
    limit = RestartLimit(0)
    assert limit.causes == ""
    assert not limit.allows("worker 0 died", 5.0)
    assert limit.causes == "worker 0 died"


def test_the_first_cause_is_named_and_the_last_if_it_is_another() -> None:
    limit = RestartLimit(2)
    for now_s in range(3):
        limit.allows("killed by SIGKILL", now_s)
    assert limit.causes == "killed by SIGKILL (the first of 3 deaths within 300 s)"
    limit.allows("exit status 1", 3)
    assert limit.causes == "killed by SIGKILL (the first of 4 deaths within 300 s; the last one: exit status 1)"
