"""Silence counts the time in which this process ran."""

from vllm_lite.client.engines.link import Silence


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_counts_between_looks_that_are_close() -> None:
    clock = Clock()
    silence = Silence(3.0, clock)
    clock.now_s += 3
    assert silence.seconds() == 3
    clock.now_s += 2
    assert silence.seconds() == 5
    silence.end()
    assert silence.seconds() == 0


def test_of_a_time_without_a_look_little_counts() -> None:
    clock = Clock()
    silence = Silence(3.0, clock)
    clock.now_s += 2
    assert silence.seconds() == 2
    clock.now_s += 1000
    assert silence.seconds() == 5
    clock.now_s += 1
    assert silence.seconds() == 6


def test_silence_is_never_negative() -> None:
    """Another thread may call end() between the look at the clock and the computation."""
    clock = Clock()
    silence = Silence(3.0, clock)
    clock.now_s += 3600
    silence._heard_s = clock.now_s
    assert silence.seconds() == 0


def test_an_end_counts_as_a_look() -> None:
    clock = Clock()
    silence = Silence(3.0, clock)
    clock.now_s += 1000
    silence.end()
    clock.now_s += 2
    assert silence.seconds() == 2
