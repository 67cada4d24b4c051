"""Simulate a load on a recorded engine, or on one with other settings: the real scheduler, with step times from a
recording of `serve --record`. Needs neither a model nor an accelerator."""

import argparse
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.tools.cli import bench_serve

if TYPE_CHECKING:
    from vllm_lite.tools.simulate.cost import StepTimes
    from vllm_lite.tools.simulate.load import SimulatedRequest
    from vllm_lite.tools.simulate.variants import Limit, Settings, Simulated


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("times of steps").add_argument
    add("fitted", metavar="FILE", nargs="?", help="what --save wrote [what comes with the program for this machine]")
    add("--fit", metavar="TRACE", nargs="+", help="fit them to traces of --record")
    add(
        "--measured",
        metavar="RESULT",
        help="result of `bench serve` for the same load: what is compared with; also the time that a first token takes "
        "outside of the engine, with --as-recorded and in the first TRACE of --fit",
    )
    add("--save", metavar="FILE", help="write the fitted times there")
    load = parser.add_argument_group("load").add_argument
    load("--load", metavar="TRACE", help="the requests of a trace, instead of those of the flags below")
    load("--tokenizer", metavar="FOLDER", help="for datasets of texts")
    bench_serve.add_datasets(load, str(bench_serve.NUM_PROMPTS))
    bench_serve.add_load(load)
    asks = parser.add_argument_group("questions").add_argument
    asks("--vary", action="append", default=[], metavar="NAME=V,V", help="simulate each of these values; repeatable")
    asks("--target", metavar="METRIC_P=TIME,...", help="the highest request rate for ttft_p99=500ms,tpot_p99=50ms")
    asks("--no-noise", action="store_true", help="use the mean time of each kind of step")
    asks("--as-recorded", action="store_true", help="with --load: the machine is as fast as it was in that trace")
    results = parser.add_argument_group("results").add_argument
    results("--json", action="store_true", help="print all figures, by their names in `bench serve`")
    results("--record", metavar="TRACE", help="write a trace of the scheduler, for `replay` and `why`")
    results("--plot", metavar="FILE.png", help="draw the last variant's latencies, and throughput over time")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools import plotting
    from vllm_lite.tools.bench import serve_plot
    from vllm_lite.tools.simulate import fit, variants
    from vllm_lite.tools.simulate.recording import Recording

    _check(arguments)
    if arguments.plot is not None:
        plotting.check(arguments.plot)
    settings = variants.variants(arguments.vary)
    measured = None if arguments.measured is None else _result(arguments.measured)
    fitted = _times(arguments, measured)
    if arguments.target is not None:
        return _search(arguments, fitted, settings)
    load = load_of_flags(arguments, arguments.request_rate)
    if arguments.as_recorded:
        fitted = fit.as_recorded(fitted, [Recording(arguments.load).read()], measured)[0]
    if arguments.record is not None and len(settings) > 1:
        raise ConfigError(f"--record writes the trace of one simulation, and --vary makes {len(settings)}")
    runs = [_simulate(arguments, fitted, each, load, arguments.record) for each in settings]
    if arguments.json:
        print(variants.encoded(runs).decode(), end="")
    else:
        print("\n".join(variants.rows(runs)))
        if measured is not None:
            print("\n".join(variants.comparison(runs[0].figures, measured)))
    if arguments.plot is not None:
        last = runs[-1]
        title = f"simulated, {variants.label(last.settings)}: {last.figures['output_throughput']:.1f} tokens/s"
        serve_plot.plot(last.outcomes, title, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for flags without effect in combination."""
    for flag in ("record", "plot"):
        if arguments.target is not None and getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} shows one simulation, and --target makes many; give one of them")
    if arguments.save is not None and arguments.fit is None:
        raise ConfigError("--save writes the times that --fit finds; give --fit TRACE with it")
    if arguments.as_recorded and (arguments.load is None or arguments.no_noise):
        raise ConfigError(
            "--as-recorded takes the machine's speed from the TRACE of --load; give one, and no --no-noise"
        )


def _times(arguments: argparse.Namespace, measured: dict[str, Any] | None) -> "StepTimes":
    """Raises ConfigError."""
    from vllm_lite.tools.simulate import cost, fit
    from vllm_lite.tools.simulate.recording import Recording

    shipped = cost.shipped_for_this_machine() if arguments.fit is None and arguments.fitted is None else None
    if shipped is not None:
        if not arguments.json:
            print(f"{shipped.model}: {fit.describe(shipped)}")
        return shipped
    if arguments.fit is not None and arguments.fitted is not None:
        raise ConfigError("give either FILE, which --save wrote, or --fit TRACE")
    if arguments.fit is None and arguments.fitted is None:
        known = f", or name those of another: {', '.join(cost.shipped())}" if cost.shipped() else ""
        lack = "the program has no times of a machine like this one"
        raise ConfigError(f"{lack}; record some (serve --record TRACE, then --fit TRACE){known}")
    if arguments.fit is None:
        return cost.read(arguments.fitted)
    recordings = [Recording(path).read() for path in arguments.fit]
    fitted = fit.fit(recordings, arguments.fit[0], fit.client_time(recordings[:1], measured))
    if arguments.save is not None:
        cost.write(fitted, arguments.save)
    if not arguments.json:
        print(fit.describe(fitted))
    return fitted


def load_of_flags(arguments: argparse.Namespace, rate: float) -> "list[SimulatedRequest]":
    """Raises ConfigError."""
    from vllm_lite.client.text.tokenizer import Tokenizer
    from vllm_lite.tools.simulate.load import LoadOptions, load_of, make_load
    from vllm_lite.tools.simulate.recording import Recording

    if arguments.load is not None:
        return load_of(Recording(arguments.load).read())
    tokenizer = Tokenizer.load(arguments.tokenizer) if arguments.tokenizer else None
    dataset = bench_serve.dataset_options(arguments)
    return make_load(LoadOptions(dataset, rate, arguments.burstiness), tokenizer)


def _simulate(
    arguments: argparse.Namespace,
    fitted: "StepTimes",
    settings: "Settings",
    load: "list[SimulatedRequest]",
    record: str | None = None,
) -> "Simulated":
    from vllm_lite.client.progress import TokenBar
    from vllm_lite.tools.simulate.variants import RunOptions, simulate

    is_shown = not arguments.json and sys.stderr.isatty()
    with TokenBar(len(load), enabled=is_shown, name="simulating", has_rate=False, stays=False) as bar:

        def report(ended: int) -> None:
            for _ in range(ended):
                bar.request()

        options = RunOptions(arguments.seed, arguments.max_concurrency, not arguments.no_noise, record, report)
        return simulate(fitted, settings, load, options)


def _search(arguments: argparse.Namespace, fitted: "StepTimes", settings: "list[Settings]") -> int:
    from vllm_lite.tools.simulate.variants import highest_rate, label

    if arguments.load is not None:
        raise ConfigError("--target looks for a request rate, which the requests of --load have already")
    limits = _limits(arguments.target)
    found: list[tuple[float, Settings]] = []
    for each in settings:

        def outcomes(rate: float, each: "Settings" = each) -> "list[Any]":
            return _simulate(arguments, fitted, each, load_of_flags(arguments, rate)).outcomes

        found.append((highest_rate(limits, outcomes), each))
    found.sort(key=lambda each: -each[0])
    if arguments.json:
        rates = [{"settings": dict(each), "request_rate": "inf" if rate == inf else rate} for rate, each in found]
        print(msgspec.json.encode(rates).decode())
    else:
        for rate, each in found:
            text = f"{rate:.3g} requests/s" if rate else "at no rate"
            if rate == inf:
                text = "all requests may come at once; simulate more of them (--num-prompts)"
            print(f"{label(each)}: {text}")
    return 0 if found[0][0] else 1


def _limits(text: str) -> "list[Limit]":
    from vllm_lite.tools.simulate.variants import Limit

    limits = []
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        metric, _, which = name.partition("_p")
        try:
            limits.append(Limit(metric, float(which), _milliseconds(value)))
        except ValueError as error:
            raise ConfigError(f"--target must look like ttft_p99=500ms,tpot_p50=50ms, got {word!r}") from error
        if metric not in bench_serve.METRICS or not 0 <= limits[-1].percentile <= 100:
            raise ConfigError(f"--target takes {', '.join(bench_serve.METRICS)} with _p0 to _p100, got {word!r}")
    return limits


def _milliseconds(text: str) -> float:
    number = float(text.removesuffix("ms") if text.endswith("ms") else text.removesuffix("s"))
    if not 0 < number < float("inf") or not text.endswith("s"):
        raise ValueError(text)
    return number if text.endswith("ms") else 1000 * number


def _result(path: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is not a result of `bench serve` ({error})") from error
