"""The noise of `vllm-lite simulate`: slow times last as long as in the recording, and stalls come in its groups."""

import random
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from tests.unit.test_simulate import load_at, made_up
from vllm_lite.tools.bench.serve_result import percentile, samples
from vllm_lite.tools.simulate import fit
from vllm_lite.tools.simulate.cost import StepTimes
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import RunOptions, simulate
from vllm_lite.tools.simulate.weather import Stall, Walk, Weather, observe

TOLD_S = 0.005
WINDOW = 200


def slow_for_seconds(count: int, rng: random.Random) -> list[float]:
    """Messages on a machine that is twice as slow for about a second in three."""
    found, slowness = list[float](), 1.0
    for _ in range(count):
        if rng.random() < (TOLD_S / 2 if slowness == 1.0 else TOLD_S / 2 * 2):
            slowness = 3.0 - slowness
        found.append(TOLD_S * slowness * rng.uniform(0.95, 1.05))
    return found


def windows(took_s: list[float]) -> list[float]:
    """The seconds of each WINDOW messages."""
    ends = [0.0, *accumulate(took_s)][::WINDOW]
    return sorted(later - earlier for earlier, later in pairwise(ends))


def walked(weather: Weather, count: int, told_s: float = TOLD_S) -> list[float]:
    walk, now_s, found = Walk(weather, random.Random(7)), 0.0, list[float]()
    for _ in range(count):
        found.append(walk.took_s(told_s, now_s))
        now_s += found[-1]
    return found


def test_slow_times_last_as_long_as_they_did() -> None:
    truth = slow_for_seconds(200_000, random.Random(1))
    weather = observe([TOLD_S] * 40_000, truth[:40_000]).weather
    again = walked(weather, 60_000)
    random.Random(2).shuffle(again_shuffled := list(again))
    for wanted in (50, 90, 99):
        real = percentile(windows(truth), wanted)
        assert percentile(windows(again), wanted) == pytest.approx(real, rel=0.1)
    assert percentile(windows(again_shuffled), 99) < 0.8 * percentile(windows(truth), 99)


def test_a_long_message_meets_as_much_as_many_short_ones() -> None:
    rng = random.Random(3)
    took_s = [each + (0.05 if rng.random() < 0.02 else 0.0) for each in slow_for_seconds(20_000, rng)]
    weather = observe([TOLD_S] * len(took_s), took_s).weather
    rates = [sum(walked(weather, count, told_s)) / (count * told_s) for count, told_s in ((80_000, 5e-3), (1000, 0.4))]
    assert rates[0] == pytest.approx(sum(took_s) / (TOLD_S * len(took_s)), rel=0.05)
    assert rates[1] == pytest.approx(rates[0], rel=0.05)


def test_what_was_observed_adds_up_and_stalls_are_where_they_were() -> None:
    rng = random.Random(4)
    told_s = [rng.choice((0.004, 0.09)) for _ in range(3000)]
    took_s = [each * rng.uniform(0.9, 1.1) for each in told_s]
    for place in (500, 501, 2000):
        took_s[place] += 1.0
    weather, ratios = observe(told_s, took_s)
    assert [stall.seconds for stall in weather.stalls] == pytest.approx([1.0] * 3, abs=0.02)
    assert weather.stalls[2].work_s == pytest.approx(sum(told_s[:2000]), abs=0.1)
    assert weather.work_s == pytest.approx(sum(told_s))
    total_s = sum(weather.slowness) * weather.cell_s + sum(stall.seconds for stall in weather.stalls)
    assert total_s == pytest.approx(sum(took_s), rel=1e-3)
    assert percentile(sorted(ratios), 50) == pytest.approx(1, abs=0.02)


def test_a_walk_goes_round_and_takes_each_stall_once() -> None:
    weather = Weather(0.5, [1.0, 3.0], [Stall(0.0, 10.0), Stall(0.75, 20.0)], memory_s=1e9)
    walk = Walk(weather, random.Random(1))
    assert walk.took_s(7.0, 0.0) == pytest.approx(7 * (0.5 + 1.5 + 30))
    parts = [walk.took_s(0.125, 0.0) for _ in range(8 * 5)]
    assert sum(parts) == pytest.approx(5 * 32)
    assert sum(part > 15 for part in parts) == 5


def test_tails_of_another_load_are_found_from_a_recording(tmp_path: Path) -> None:
    """Stalls in groups, and slow times: requests of a load that was not recorded meet them as they would have."""
    rng = random.Random(5)
    slowness = [rng.choice((1.0, 1.0, 1.8)) for _ in range(30)]
    weather = Weather(1.0, slowness, [Stall(at + 0.1 * n, 0.06) for at in range(0, 30, 5) for n in range(5)], 3.0)
    real, path = made_up(weather=weather), str(tmp_path / "trace")
    simulate(real, {}, load_at(10.0, 300), RunOptions(3, record=path))
    fitted = fit.fit(Recording(path).read(), "slow at times")
    assert fitted.weather is not None
    assert 10 < len(fitted.weather.stalls) < 60
    load = load_at(5.0, 150, seed=9)

    def tails(times: StepTimes, *, has_noise: bool = True) -> tuple[float, float]:
        """Mean and 99th percentile of the time per token, over the requests of some seeds."""
        runs = (simulate(times, {}, load, RunOptions(seed, has_noise=has_noise)) for seed in range(3))
        found = sorted(value for run in runs for value in samples(run.outcomes)["tpot"])
        return sum(found) / len(found), percentile(found, 99)

    expected = tails(real)
    assert tails(fitted) == pytest.approx(expected, rel=0.2)
    assert tails(fitted, has_noise=False)[1] < 0.75 * expected[1]
