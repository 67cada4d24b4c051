"""Variants of settings and loads that are simulated in turn, and their results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.bench.serve_result import percentile, samples, summarize
from vllm_lite.tools.simulate.cost import StepTimer, StepTimes
from vllm_lite.tools.simulate.engines import VARIED
from vllm_lite.tools.simulate.load import SimulatedRequest
from vllm_lite.tools.simulate.simulation import Simulation

PERCENTILES = (50.0, 90.0, 99.0)
MAX_VARIANTS = 1000
RATE_EXACTNESS = 1.02
"""Factor to which the highest rate is determined."""
SEEDS_APART = 1 << 32
"""Distance between the seeds of two engines, whose machines are independent."""
MOST_RATE, LEAST_RATE = 1e5, 1e-3

Settings = Mapping[str, Any]


class Simulated(NamedTuple):
    """A variant and its results: figures with the names of `bench serve`, and some that only the engine knows."""

    settings: Settings
    figures: dict[str, Any]
    outcomes: list[Outcome]


class RunOptions(NamedTuple):
    """The way in which a load is simulated. `report` is called with the number of requests that have just ended."""

    seed: int = 0
    max_concurrency: int | None = None
    has_noise: bool = True
    record: str | None = None
    """Path to which a trace of the run is written."""
    report: Callable[[int], None] = lambda _: None


PLAIN = RunOptions()


class Limit(NamedTuple):
    """Maximum of a percentile of a metric."""

    metric: str
    percentile: float
    most_ms: float

    def holds(self, outcomes: Sequence[Outcome]) -> bool:
        values = sorted(1000 * value for value in samples(outcomes)[self.metric])
        return percentile(values, self.percentile) <= self.most_ms


def variants(words: Sequence[str]) -> list[Settings]:
    """All combinations of NAME=VALUE,VALUE words. Raises ConfigError."""
    axes = list[tuple[str, list[Any]]]()
    for word in words:
        name, _, values = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in VARIED or not values:
            raise ConfigError(f"--vary takes NAME=VALUE,VALUE with NAME one of {', '.join(VARIED)}, got {word!r}")
        axes.append((name, [_value(name, value) for value in values.split(",")]))
    found = [dict(zip((name for name, _ in axes), values, strict=True)) for values in product(*(v for _, v in axes))]
    if len(found) > MAX_VARIANTS:
        raise ConfigError(f"--vary makes {len(found)} variants; at most {MAX_VARIANTS} are simulated")
    return list(found)


def _value(name: str, text: str) -> Any:
    """Parse a value as EngineConfig does."""
    return getattr(EngineConfig.check({name: text}), name)


def simulate(
    fitted: StepTimes | Sequence[StepTimes],
    settings: Settings,
    load: Sequence[SimulatedRequest],
    options: RunOptions = PLAIN,
) -> Simulated:
    """Simulate one variant. `fitted`: the times of all engines, or those of each. Raises ConfigError."""
    machines = [fitted] if isinstance(fitted, StepTimes) else fitted

    def timer(engine: int) -> StepTimer:
        machine = machines[engine % len(machines)]
        return StepTimer(machine, options.seed + SEEDS_APART * engine, has_noise=options.has_noise)

    simulation = Simulation(machines[0], settings, timer, options.max_concurrency, options.record)
    outcomes = simulation.run(load, options.report)
    ends_s = [outcome.chunks_s[-1] for outcome in outcomes if len(outcome.chunks_s)]
    figures = summarize(outcomes, max(ends_s, default=0.0), PERCENTILES, {})
    engines = simulation.engines.all
    counters = [engine.core.scheduler.counters for engine in engines]
    prompt_tokens = max(1, sum(outcome.input_len for outcome in outcomes))
    pools = [engine.core.kv.pool for engine in engines]
    clock_s = max(simulation.clock.now_s, 1e-9)
    figures |= {
        "steps": sum(each.steps for each in counters),
        "preemptions": sum(each.preemptions for each in counters),
        "swaps": sum(each.swaps for each in counters),
        "prefix_hit_rate": sum(each.cached_tokens for each in counters) / prompt_tokens,
        "loaded_tokens": sum(engine.core.stats().loaded_tokens for engine in engines),
        "peak_kv_usage": max(pool.peak_used / pool.num_usable for pool in pools),
        "workers_busy": sum(each.executor.busy_s for each in engines) / len(engines) / clock_s,
    }
    return Simulated(settings, figures, outcomes)


def highest_rate(limits: Sequence[Limit], run: Callable[[float], Sequence[Outcome]]) -> float:
    """The highest number of requests per second at which all `limits` hold; 0 if there is none, infinity if they hold
    for requests that come all at once. `run` simulates a rate."""

    def holds(rate: float) -> bool:
        outcomes = run(rate)
        return all(limit.holds(outcomes) for limit in limits)

    low, high = 0.0, 1.0
    while high <= MOST_RATE and holds(high):
        low, high = high, 2 * high
    if high > MOST_RATE:
        return float("inf")
    while low == 0.0 and high > LEAST_RATE:
        if holds(high / 2):
            low = high / 2
        else:
            high /= 2
    while low > 0.0 and high / low > RATE_EXACTNESS:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def without_lists(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if not isinstance(value, list)}


def encoded(runs: Sequence[Simulated]) -> bytes:
    """JSON of all variants, equal for equal runs."""
    found = [{"settings": dict(each.settings), **without_lists(each.figures)} for each in runs]
    return msgspec.json.format(msgspec.json.encode(found)) + b"\n"


def rows(runs: Sequence[Simulated]) -> Iterator[str]:
    """A table with a line for each variant."""
    titles = ("req/s", "tok/s", "ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2el p50", "hits", "preempted", "KV")
    labels = [label(each.settings) for each in runs]
    width = max(8, *map(len, labels))
    yield f"{'':<{width}}" + "".join(f"{title:>11}" for title in titles)
    for name, each in zip(labels, runs, strict=True):
        figures = each.figures
        values = [f"{figures['request_throughput']:.2f}", f"{figures['output_throughput']:.1f}"]
        for metric in ("ttft", "tpot"):
            values += [f"{figures[f'median_{metric}_ms']:.1f} ms", f"{figures[f'p99_{metric}_ms']:.1f} ms"]
        values += [f"{figures['median_e2el_ms'] / 1000:.2f} s", f"{figures['prefix_hit_rate']:.1%}"]
        values += [str(figures["preemptions"]), f"{figures['peak_kv_usage']:.1%}"]
        yield f"{name:<{width}}" + "".join(f"{value:>11}" for value in values)


def label(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "recorded"


COMPARED = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "ttft p50, ms",
    "p99_ttft_ms": "ttft p99, ms",
    "median_tpot_ms": "tpot p50, ms",
    "p99_tpot_ms": "tpot p99, ms",
    "median_e2el_ms": "e2el p50, ms",
    "p99_e2el_ms": "e2el p99, ms",
}


def comparison(simulated: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """A table of simulated and measured figures, with the error of each. Raises ConfigError for a file without
    figures."""
    yield f"{'':<18}{'simulated':>12}{'measured':>12}{'error':>9}"
    for name, title in COMPARED.items():
        if not isinstance(measured.get(name), int | float):
            raise ConfigError(f"the measured result has no {name}; `bench serve --save-result` writes it")
        ours, theirs = simulated[name], measured[name]
        error = f"{ours / theirs - 1:+.1%}" if theirs else "-"
        yield f"{title:<18}{ours:>12.2f}{theirs:>12.2f}{error:>9}"
