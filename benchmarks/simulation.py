"""Errors of `vllm-lite simulate`: fitted to one load, asked about others that are measured beside it, in turn.

    python benchmarks/simulation.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out FOLDER   # 2.5 minutes for each run
    python benchmarks/simulation.py --out FOLDER --again     # simulates again what FOLDER holds, and measures nothing
    python benchmarks/simulation.py --model FILE --engines 2 --rate 0.8    # behind the prefix router, a core for each
    python benchmarks/simulation.py --qwen3 TOKENIZER --serve "--quantization int4_g32" --rate 0.25 --share 0.25

A run measures the load to fit and then each of the others, every one with a server of its own that records. The times
are fitted to the loads in FIT of all runs, so the fit has the same fast and slow times of the machine as the other
loads.

A figure is the median of the runs. The table has its error, the spread of the runs (smaller errors cannot be
distinguished from noise), and the error of a simulation that has each run's speed of the machine, from moment to
moment, and its hits of drafts. FOLDER keeps traces, results and fitted.json.

--qwen3 measures the shape of Qwen3-0.6B with random weights; TOKENIZER is a folder with its tokenizer
(scripts/fetch_real.py gets one).
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import peers_report as report
from http_peers import PORT, serving
from kv_disk import QWEN3

from vllm_lite.tools.cli import simulate as command
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import COMPARED, RunOptions, simulate

FIT = {
    "fit": "--random-input-len 500 --random-range-ratio 0.9 --random-output-len 64 --request-rate {fit}"
    " --num-prompts 44",
    "fit, a burst": "--random-input-len 500 --random-range-ratio 0.9 --random-output-len 64 --num-prompts 16",
}
"""The load to fit: a few requests at a time, and then many."""
LOADS = {
    "longer answers": "--random-input-len 256 --random-range-ratio 0.5 --random-output-len 128 --request-rate {slow}"
    " --num-prompts 45",
    "shared prefixes": "--dataset-name prefix_repetition --prefix-repetition-prefix-len 400"
    " --prefix-repetition-suffix-len 100 --prefix-repetition-num-prefixes 5 --prefix-repetition-output-len 48"
    " --request-rate {fast} --num-prompts 90",
    "12 at once": "--random-input-len 300 --random-range-ratio 0.3 --random-output-len 60 --max-concurrency 12"
    " --num-prompts 80",
    "chats": "--dataset-name chats --chat-message-len 100 --chat-output-len 64 --chat-wait 2 --request-rate {slow}"
    " --num-prompts 48",
}
RATES = {"fit": 2.2, "slow": 1.5, "fast": 3.5}
BARS = {"request_throughput": 2, "median_tpot_ms": 4, "p99_tpot_ms": 4, "median_ttft_ms": 8, "p99_ttft_ms": 15}
"""Maximum error of each figure in percent, the goal of this project."""
VOCAB_SIZE = 151_936
SEEDS = 7
"""Number of seeds to simulate; the median counts, as one seed gives one machine's chance."""


class Cell(NamedTuple):
    """A figure of a load: its simulated and its measured median. In percent: its bar, the spread of the runs, the error
    with random weather, and the median error with the recorded speed of the machine."""

    load: str
    figure: str
    simulated: float
    measured: float
    bar: float
    spread: float
    error: float
    own_error: float
    own_errors: list[float]
    """Own errors of the runs."""


def main() -> int:
    arguments = parsed()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    loads = {
        name: fewer(flags.format(**{rate: each * arguments.rate for rate, each in RATES.items()}), arguments.share)
        for name, flags in (FIT | LOADS).items()
        if name in FIT or not arguments.loads or name in arguments.loads
    }
    if not arguments.again:
        if arguments.qwen3 is not None:
            arguments.model = qwen3(Path(arguments.qwen3), folder / "model")
            arguments.serve += " --load-format dummy"
        if arguments.model is None:
            raise SystemExit("give --model FILE, or --again for what FOLDER holds")
        for seed in range(arguments.first, arguments.first + arguments.runs):
            for name, flags in loads.items():
                measure(arguments, flags, seed, folder / f"{name}-{seed}")
    fitted = fit_pieces(folder, arguments.engines)
    cost.write(fitted, str(folder / "fitted.json"))
    if arguments.ship is not None:
        cost.SHIPPED.mkdir(exist_ok=True)
        cost.write(fitted, str(cost.SHIPPED / f"{arguments.ship}.json"))
    print(fit.describe(fitted))
    titles = ("simulated", "measured", "error", "bar", "runs differ by", "machine as it was")
    print(f"{'':<32}" + "".join(f"{title:>18}" for title in titles))
    found = list[Cell]()
    for cell in cells(folder, fitted, loads, arguments.engines):
        show(cell)
        found.append(cell)
    if arguments.results is not None:
        write(Path(arguments.results), arguments.name, arguments, found)
    misses = sum(abs(each.error) > each.bar for each in found)
    own_misses = sum(abs(each.own_error) > each.bar for each in found)
    print(f"off by more than their bars: {misses} figures, and {own_misses} with the machine as fast as it was")
    return int(misses > 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--qwen3", metavar="TOKENIZER", help="measure the shape of Qwen3-0.6B instead of --model")
    parser.add_argument("--engines", type=int, default=1, help="--data-parallel-size of the server [1]")
    parser.add_argument("--out", default=tempfile.gettempdir() + "/simulation", metavar="FOLDER")
    parser.add_argument("--runs", type=int, default=2, help="of each load [2]")
    parser.add_argument("--first", type=int, default=1, help="number of the first run [1]")
    parser.add_argument("--rate", type=float, default=1.0, help="rates as a multiple of those of the EPYC [1]")
    parser.add_argument("--serve", default="", help="more flags of `serve`")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests that are sent, for slower models [1]")
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="only these [all]")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--results", metavar="FILE", help="JSON file for the figures, under --name")
    parser.add_argument("--name", default="plain", help="of these flags in --results [plain]")
    parser.add_argument("--ship", metavar="MODEL_MACHINE", help="have the program bring the fitted times with it")
    return parser.parse_args()


def qwen3(tokenizer: Path, folder: Path) -> str:
    """A folder with the shape of Qwen3-0.6B and its tokenizer, without weights."""
    folder.mkdir(exist_ok=True)
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"vocab_size": VOCAB_SIZE}))
    return str(folder)


def fewer(flags: str, share: float) -> str:
    """Reduce a load to a share of its requests, whose number is the last of its flags."""
    before, count = flags.rsplit(" ", 1)
    return f"{before} {max(1, round(share * int(count)))}"


def measure(arguments: argparse.Namespace, flags: str, seed: int, path: Path) -> None:
    """Start a server that records, and send it a load."""
    print(f"measuring {path.name}", flush=True)
    serve = [sys.executable, "-m", "vllm_lite", "serve", arguments.model, "--port", str(PORT), *arguments.serve.split()]
    serve += ["--data-parallel-size", str(arguments.engines)] if arguments.engines > 1 else []
    with serving([*serve, "--record", f"{path}.trace"], {}, path.with_suffix(".log")) as url:
        words = [sys.executable, "-m", "vllm_lite", "bench", "serve", "--base-url", url, *flags.split(), "--ignore-eos"]
        words += ["--seed", str(seed), "--result-filename", f"{path}.json", "--save-detailed"]
        words += ["--metric-percentiles", "50,90,99", "--disable-tqdm"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def fit_pieces(folder: Path, engines: int = 1) -> cost.StepTimes:
    """Fit times to the recordings of the loads in FIT."""
    paths = sorted(path for name in FIT for path in folder.glob(f"{name}-*.json"))
    recordings = [read(path, engines) for path in paths]
    results = [result_of(path) for path in paths]
    # Not bursts: most of the time to their first tokens outside of the engine is waiting for other requests.
    pairs = [pair for pair in zip(recordings, results, strict=True) if pair[1]["request_rate"] != "inf"]
    client_s = statistics.median(fit.client_time(*pair) for pair in pairs)
    return fit.fit([each for run in recordings for each in run], results[0]["model_id"], client_s)


def read(result: Path, engines: int) -> list[Recording]:
    """The recordings of a run, one of each engine."""
    trace = result.with_suffix(".trace")
    names = [str(trace)] if engines == 1 else [f"{trace}.{engine}" for engine in range(engines)]
    return [Recording(name).read() for name in names]


def result_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def cells(folder: Path, fitted: cost.StepTimes, loads: dict[str, str], engines: int) -> Iterator[Cell]:
    """The figures of each load."""
    for name, flags in loads.items():
        paths = sorted(folder.glob(f"{name}-*.json"))
        measured = [result_of(path) for path in paths]
        machines = [fitted] * engines
        simulations = [[simulated(machines, flags, path, seed) for seed in range(SEEDS)] for path in paths]
        recordings = [read(path, engines) for path in paths]
        as_it_was = [fit.as_recorded(fitted, *pair) for pair in zip(recordings, measured, strict=True)]
        own = [simulated(machines, flags, path, 0) for machines, path in zip(as_it_was, paths, strict=True)]
        for key in COMPARED if paths else ():
            theirs = [float(each[key]) for each in measured]
            was, spread = statistics.median(theirs), 100 * (max(theirs) / min(theirs) - 1)
            found = statistics.median(float(each[key]) for runs in simulations for each in runs)
            own_errors = [100 * (float(each[key]) / their - 1) for each, their in zip(own, theirs, strict=True)]
            error, own_error = 100 * (found / was - 1), statistics.median(own_errors)
            bar = BARS.get(key, math.inf) if name not in FIT else math.inf
            yield Cell(name, COMPARED[key], found, was, bar, spread, error, own_error, own_errors)


def show(cell: Cell) -> None:
    words = [f"{cell.simulated:.2f}", f"{cell.measured:.2f}", f"{cell.error:+.1f} %"]
    words += ["" if cell.bar == math.inf else f"{cell.bar} %", f"{cell.spread:.1f} %", f"{cell.own_error:+.1f} %"]
    print(f"{cell.load:<15} {cell.figure:<16}" + "".join(f"{word:>18}" for word in words), flush=True)


def write(path: Path, name: str, arguments: argparse.Namespace, found: list[Cell]) -> None:
    """Write the cells with bars to a JSON file under `name`; cells under other names are kept."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    how = {key: getattr(arguments, key) for key in ("runs", "rate", "share", "serve", "engines")}
    head = {"date": time.strftime("%Y-%m-%d"), "commit": report.commit(), "model": arguments.model or "Qwen3-0.6B"}
    figures = [
        each._replace(
            simulated=round(each.simulated, 2),
            measured=round(each.measured, 2),
            spread=round(each.spread, 1),
            error=round(each.error, 1),
            own_error=round(each.own_error, 1),
            own_errors=[round(error, 1) for error in each.own_errors],
        )._asdict()
        for each in found
        if each.bar < math.inf
    ]
    kept[name] = head | {"device": report.device()} | how | {"cells": figures}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def simulated(machines: list[cost.StepTimes], flags: str, path: Path, seed: int) -> dict[str, Any]:
    """Simulate the measured requests. `seed` is that of the weather; `machines` has the times of each engine."""
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    arguments = parser.parse_args(["FILE", *flags.split(), "--seed", path.stem.rpartition("-")[2]])
    load = command.load_of_flags(arguments, arguments.request_rate)
    settings = {"data_parallel_size": len(machines)}
    return simulate(machines, settings, load, RunOptions(seed, arguments.max_concurrency)).figures


if __name__ == "__main__":
    sys.exit(main())
