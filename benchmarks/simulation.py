"""Errors of `vllm-lite simulate`: fitted to one recorded load, asked about others that are measured beside it.

    python benchmarks/simulation.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out FOLDER   # about 5 minutes
    python benchmarks/simulation.py --out FOLDER --again     # simulates again what FOLDER holds, and measures nothing

Each figure is the median of the runs, simulated with as many seeds as were measured; beside its error stands by how
much the runs differ from each other, below which no error can be known. FOLDER keeps traces, results and fitted.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_peers import PORT, serving

from vllm_lite.tools.cli import simulate as command
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import COMPARED, RunOptions, simulate

FIT = "--random-input-len 500 --random-range-ratio 0.9 --random-output-len 64 --request-rate {fit} --num-prompts 130"
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
"""Percent that a figure may be off, as the project wants it."""


def main() -> int:
    arguments = parsed()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    rates = {name: rate * arguments.rate for name, rate in RATES.items()}
    if not arguments.again:
        if arguments.model is None:
            raise SystemExit("give --model FILE, or --again for what FOLDER holds")
        measure(arguments, folder, rates)
    measured = json.loads((folder / "fit.json").read_text())
    recording = Recording(str(folder / "fit.trace")).read()
    fitted = fit.fit(recording, measured["model_id"], fit.client_time(recording, measured))
    cost.write(fitted, str(folder / "fitted.json"))
    if arguments.ship is not None:
        cost.SHIPPED.mkdir(exist_ok=True)
        cost.write(fitted, str(cost.SHIPPED / f"{arguments.ship}.json"))
    print(fit.describe(fitted))
    misses = 0
    for line, is_miss in compared(folder, fitted, rates):
        print(line, flush=True)
        misses += is_miss
    print(f"{misses} figures are off by more than their bar")
    return int(misses > 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--out", default=tempfile.gettempdir() + "/simulation", metavar="FOLDER")
    parser.add_argument("--runs", type=int, default=2, help="of each load [2]")
    parser.add_argument("--rate", type=float, default=1.0, help="rates as a multiple of those of the EPYC [1]")
    parser.add_argument("--serve", default="", help="more flags of `serve`")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--ship", metavar="MODEL_MACHINE", help="have the program bring the fitted times with it")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, folder: Path, rates: dict[str, float]) -> None:
    """Record the load to fit with one server, and the others with a second one."""
    serve = [sys.executable, "-m", "vllm_lite", "serve", arguments.model, "--port", str(PORT), *arguments.serve.split()]
    with serving([*serve, "--record", str(folder / "fit.trace")], {}, folder / "fit.log") as url:
        send(url, FIT.format(**rates), 0, folder / "fit.json")
    with serving([*serve, "--record", str(folder / "held.trace")], {}, folder / "held.log") as url:
        for seed in range(1, arguments.runs + 1):
            for name, flags in LOADS.items():
                send(url, flags.format(**rates), seed, folder / f"{name}-{seed}.json")


def send(url: str, flags: str, seed: int, result: Path) -> None:
    words = [sys.executable, "-m", "vllm_lite", "bench", "serve", "--base-url", url, *flags.split(), "--ignore-eos"]
    words += [
        "--seed",
        str(seed),
        "--result-filename",
        str(result),
        "--metric-percentiles",
        "50,90,99",
        "--disable-tqdm",
    ]
    print(f"measuring {result.stem}", flush=True)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def compared(folder: Path, fitted: cost.StepTimes, rates: dict[str, float]) -> Iterator[tuple[str, bool]]:
    """Lines of the table, and whether each misses its bar."""
    yield f"{'':<34}{'simulated':>11}{'measured':>11}{'error':>9}{'bar':>6}{'runs differ by':>16}", False
    for name, flags in {"the fitted load": FIT, **LOADS}.items():
        results = sorted(folder.glob("fit.json" if flags is FIT else f"{name}-*.json"))
        pairs = [(simulated(fitted, flags.format(**rates), each), json.loads(each.read_text())) for each in results]
        for key in COMPARED if pairs else ():
            ours, theirs = ([float(figures[key]) for figures in column] for column in zip(*pairs, strict=True))
            is_, was = statistics.median(ours), statistics.median(theirs)
            error, spread = 100 * (is_ / was - 1), 100 * (max(theirs) / min(theirs) - 1)
            is_miss = key in BARS and abs(error) > BARS[key] and flags is not FIT
            bar = f"{BARS[key]} %" if key in BARS else ""
            line = f"{name:<16}  {COMPARED[key]:<16}{is_:>11.2f}{was:>11.2f}{error:>+8.1f}%{bar:>6}{spread:>15.1f}%"
            yield line + ("  misses" if is_miss else ""), is_miss


def simulated(fitted: cost.StepTimes, flags: str, result: Path) -> dict[str, Any]:
    seed = 0 if result.stem == "fit" else int(result.stem.rpartition("-")[2])
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    arguments = parser.parse_args(["FILE", *flags.split(), "--seed", str(seed)])
    load = command.load_of_flags(arguments, arguments.request_rate)
    return simulate(fitted, {}, load, RunOptions(seed, arguments.max_concurrency)).figures


if __name__ == "__main__":
    sys.exit(main())
