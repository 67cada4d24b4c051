"""The noise of `vllm-lite simulate`: slow times last as long as in the recording, and stalls come in its groups."""

import random
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from tests.unit.test_simulate import load_at, made_up
from vllm_lite.tools.bench.serve_result import percentile, samples
from vllm_lite.tools.cli import main
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.cost import StepTimer, StepTimes
from vllm_lite.tools.simulate.features import NAMES
from vllm_lite.tools.simulate.load import load_of
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import RunOptions, encoded, simulate
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
    walk = Walk(weather, random.Random(7))
    return [walk.took_s(told_s) for _ in range(count)]


def test_slow_times_last_as_long_as_they_did() -> None:
    truth = slow_for_seconds(200_000, random.Random(1))
    weather = observe([TOLD_S] * 40_000, truth[:40_000]).weather
    again = walked(weather, 60_000)
    random.Random(2).shuffle(again_shuffled := list(again))
    for wanted in (50, 90, 99):
        real = percentile(windows(truth), wanted)
        assert percentile(windows(again), wanted) == pytest.approx(real, rel=0.1)
    assert percentile(windows(again_shuffled), 99) < 0.8 * percentile(windows(truth), 99)


def test_long_messages_have_the_same_share_of_stalls_as_short_ones() -> None:
    rng = random.Random(3)
    took_s = [each + (0.05 if rng.random() < 0.02 else 0.0) for each in slow_for_seconds(20_000, rng)]
    weather = observe([TOLD_S] * len(took_s), took_s).weather
    rates = [sum(walked(weather, count, told_s)) / (count * told_s) for count, told_s in ((80_000, 5e-3), (1000, 0.4))]
    assert rates[0] == pytest.approx(sum(took_s) / (TOLD_S * len(took_s)), rel=0.05)
    assert rates[1] == pytest.approx(rates[0], rel=0.05)


def test_a_busy_machine_is_slow_for_as_much_of_its_work_as_it_was() -> None:
    """Slow times outlast the pieces here, which would hold less of their work if they were of equal times."""
    weather = Weather(1.0, [1.0] * 10 + [3.0] * 10, [], memory_s=0.5)
    assert sum(walked(weather, 400_000)) == pytest.approx(2.0 * 400_000 * TOLD_S, rel=0.05)


def test_observed_times_add_up_and_stalls_keep_their_places() -> None:
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


def test_a_walk_repeats_and_has_each_stall_once() -> None:
    weather = Weather(0.5, [1.0, 3.0], [Stall(0.0, 10.0), Stall(0.75, 20.0)], memory_s=1e9)
    walk = Walk(weather, random.Random(1))
    assert walk.took_s(7.0) == pytest.approx(7 * (0.5 + 1.5 + 30))
    parts = [walk.took_s(0.125) for _ in range(8 * 5)]
    assert sum(parts) == pytest.approx(5 * 32)
    assert sum(part > 15 for part in parts) == 5


def test_tails_of_another_load_are_found_from_a_recording(tmp_path: Path) -> None:
    """Stalls in groups, and slow times: requests of a load that was not recorded meet them as they would have."""
    rng = random.Random(5)
    slowness = [rng.choice((1.0, 1.0, 1.8)) for _ in range(30)]
    weather = Weather(1.0, slowness, [Stall(at + 0.1 * n, 0.06) for at in range(0, 30, 5) for n in range(5)], 3.0)
    real, path = made_up(weather=weather), str(tmp_path / "trace")
    simulate(real, {}, load_at(10.0, 300), RunOptions(1, record=path))
    fitted = fit.fit([Recording(path).read()], "slow at times")
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


def test_variants_of_a_seed_meet_the_same_weather() -> None:
    """Noise that changes nothing is drawn beside it."""
    weather = Weather(0.1, [1.0, 2.0, 3.0, 4.0], [], 0.05)
    features = [float(name == "message") for name in NAMES]
    plain, noisy = (made_up(noise=noise, weather=weather) for noise in ({}, {"decodes": [1.0, 1.0]}))
    first, second, other = (StepTimer(*each) for each in ((plain, 5), (noisy, 5), (plain, 6)))
    drawn = [[timer.took_s(features) for _ in range(2000)] for timer in (first, second, other)]
    assert drawn[0] == pytest.approx(drawn[1])
    assert drawn[0] != pytest.approx(drawn[2])


def test_requests_have_their_recorded_times_with_the_recorded_weather(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(6)
    weather = Weather(0.5, [rng.choice((1.0, 1.2, 1.8)) for _ in range(40)], [Stall(3.0, 0.3)], 3.0)
    path = str(tmp_path / "trace")
    real = simulate(made_up(weather=weather), {}, load_at(10.0, 150), RunOptions(3, record=path))
    recording = Recording(path).read()
    fitted = fit.fit([recording], "slow at times")

    def misses(times: StepTimes) -> float:
        """Median relative error of the requests' simulated latencies."""
        again = simulate(times, {}, load_of(recording))
        pairs = zip(again.outcomes, real.outcomes, strict=True)
        return percentile(sorted(abs(ours.latency_s / theirs.latency_s - 1) for ours, theirs in pairs), 50)

    (again,) = fit.as_recorded(fitted, [recording])
    assert misses(again) < 0.02
    assert misses(fitted) > 0.08
    cost.write(fitted, times := str(tmp_path / "times.json"))
    assert main(["simulate", times, "--load", path, "--as-recorded", "--json"]) == 0
    assert capsys.readouterr().out.encode() == encoded([simulate(again, {}, load_of(recording))])
    detailed = real.figures | {"ttfts": [outcome.ttft_s + 0.25 for outcome in real.outcomes]}
    assert fit.as_recorded(fitted, [recording], detailed)[0].client_s == pytest.approx(0.25)
