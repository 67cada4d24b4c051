"""The report of peers.py: medians of undisturbed repeats, comparisons with the best peer, tables."""

import itertools
import os
import platform
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

Run = dict[str, Any]  # one repeat, as runners/driver.py measured it
REFERENCE = "hf-bf16"
DTYPES = ("bf16", "int8", "int4")
"""The engine whose tokens the others' are compared with."""
ONE_STREAM = ("W1", "W6", "W7")
HARDLY_DISTURBED = 2
"""Number of the least disturbed repeats whose median is shown if no repeat of a cell was undisturbed."""


def speed_metric(workload: str) -> str:
    """Name of a workload's figure. W1, W6 and W7 are one stream, without the time of the prompt; "start" is the
    start-up pass."""
    return {"start": "since_start_s"}.get(workload, "decode_tok_s" if workload in ONE_STREAM else "out_tok_s")


def median(runs: list[Run], metric: str) -> tuple[float, int]:
    """The median over the clean repeats and their number; without any, over the least disturbed ones and 0."""
    runs = sorted((run for run in runs if metric in run), key=lambda run: float(run["foreign_cores"]))
    clean = [run[metric] for run in runs if run["clean"]]
    return statistics.median(clean or [run[metric] for run in runs[:HARDLY_DISTURBED]]), len(clean)


def is_ours(engine: str) -> bool:
    """Whether an engine is ours, also with other forms or files of a type, such as ours_g32-int4."""
    return engine.startswith(("ours-", "ours_"))


def dtype_of(engine: str) -> str:
    return engine.rpartition("-")[2]


class Figures:
    """Gathers the results of all passes. `repeats`: undisturbed repeats that were wanted for every cell."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self.runs: dict[tuple[str, str, str], list[Run]] = defaultdict(list)  # by model, workload, engine
        self.engines: dict[str, dict[str, Any]] = {}
        self._memory: dict[tuple[str, str], int] = {}
        self._startup: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._busy: dict[str, Any] = {}
        self._limits: dict[str, dict[str, dict[str, float | None]]] = {}
        self._commits: set[str] = set()

    def add_quiet(self, model: str, engine: str, workloads: list[str], result: dict[str, Any]) -> None:
        for workload in workloads:
            self.runs[model, workload, engine] += result.get("runs", {}).get(workload, [])
        if "info" in result:
            self.engines[engine] = result["info"]
        if result.get("memory_bytes"):
            self._memory[model, engine] = max(self._memory.get((model, engine), 0), result["memory_bytes"])
        if is_ours(engine) and "commit" in result:
            self._commits.add(result["commit"])

    def add_limit(self, model: str, dtype: str, workload: str, tokens_s: float) -> None:
        self._limits.setdefault(model, {}).setdefault(dtype, {})[workload] = _round(tokens_s)

    def add_startup(self, model: str, engine: str, result: dict[str, Any]) -> None:
        self._startup[model, engine] += [run["since_start_s"] for run in result.get("runs", {}).get("start", [])]

    def add_busy(self, model: str, engine: str, workloads: list[str], result: dict[str, Any]) -> None:
        """Add quiet and busy repeats of one run; a missing busy speed is None."""
        for workload in workloads:
            runs = result.get("runs", {}).get(workload, [])
            sides = [[run for run in runs if bool(run["busy"]) == busy] for busy in (False, True)]
            quiet, busy = (median(side, speed_metric(workload))[0] if side else None for side in sides)
            figures = {
                "quiet": _round(quiet),
                "busy": _round(busy),
                "share": _round(busy / quiet if quiet and busy else None),
            }
            figures["failed"] = result.get("failed") or result.get("errors", {}).get(workload)
            self._busy.setdefault(model, {}).setdefault(workload, {})[engine] = figures

    def summary(self) -> dict[str, Any]:
        """Content of the JSON file, without device and date."""
        everything = self._everything()
        startup = {key: statistics.median(times) for key, times in self._startup.items() if times}
        return {
            "commit": ", ".join(sorted(self._commits)) or commit(),
            "repeats": self._repeats,
            "engines": self.engines,
            "rows": [row | {"spread": spread(self.runs, row)} for row in rows(everything, higher_is_better=True)],
            "ttft": rows(everything, higher_is_better=False),
            "limits": self._limits,
            "all": everything,
            "memory": _nested({key: round(count / 2**20) for key, count in self._memory.items()}),
            "startup": _nested({key: round(seconds, 2) for key, seconds in startup.items()}),
            "busy": self._busy,
            "equality": equality(self.runs),
        }

    def _everything(self) -> dict[str, Any]:
        """Model -> workload -> engine -> figures."""
        found: dict[str, Any] = {}
        for (model, workload, engine), runs in self.runs.items():
            if not runs:
                continue
            speed, clean = median(runs, speed_metric(workload))
            found.setdefault(model, {}).setdefault(workload, {})[engine] = {
                speed_metric(workload): _round(speed),
                "ttft_s": _round(median(runs, "ttft_s")[0]),
                "clean": clean,
                "measured": len(runs),
            }
        return found


def rows(everything: dict[str, Any], *, higher_is_better: bool) -> list[dict[str, Any]]:
    """Compare each of our engines with the best peer of the same type, in every cell that both have.

    `ratio` says how many times better ours is: above 1 ours is ahead, for speeds and for times to the first token.
    """
    found = []
    for model, workloads in everything.items():
        for dtype, (workload, engines) in itertools.product(DTYPES, workloads.items()):
            metric = speed_metric(workload) if higher_is_better else "ttft_s"
            values = {name: cell[metric] for name, cell in engines.items() if dtype_of(name) == dtype}
            peers = {name: value for name, value in values.items() if not is_ours(name)}
            if not peers:
                continue
            peer = (max if higher_is_better else min)(peers, key=lambda name: float(peers[name]))
            best = peers[peer]
            for engine, ours in values.items():
                if is_ours(engine):
                    ratio = round(ours / best if higher_is_better else best / ours, 3)
                    row = {"model": model, "dtype": dtype, "workload": workload, "metric": metric, "engine": engine}
                    found.append(row | {"ours": ours, "peer": peer, "best_peer": best, "ratio": ratio})
    return found


def spread(runs: dict[tuple[str, str, str], list[Run]], row: dict[str, Any]) -> list[float]:
    """The smallest and the largest ratio of ours to that peer in repeats with the same prompts; [] if there are
    none."""
    model, workload, metric = row["model"], row["workload"], row["metric"]
    theirs, ours = (
        {run["rep"]: run[metric] for run in runs[model, workload, engine] if metric in run}
        for engine in (row["peer"], row["engine"])
    )
    ratios = [round(ours[rep] / theirs[rep], 3) for rep in ours.keys() & theirs.keys()]
    return [min(ratios), max(ratios)] if ratios else []


def equality(runs: dict[tuple[str, str, str], list[Run]]) -> dict[str, Any]:
    """Model -> workload -> engine: the number of requests with the reference's tokens, and the positions at which
    others first differ.

    Only for bf16 engines, and for repeats with the same prompts. With random weights, the margins between the best
    tokens are small, so the last bit of a sum decides; after the first difference, two outputs are unrelated.
    """
    found: dict[str, Any] = {}
    for (model, workload, engine), theirs in runs.items():
        reference = {run["rep"]: run["tokens"] for run in runs.get((model, workload, REFERENCE), [])}
        pairs = [
            pair
            for run in theirs
            if run["rep"] in reference
            for pair in zip(run["tokens"], reference[run["rep"]], strict=True)
        ]
        if engine == REFERENCE or dtype_of(engine) != "bf16" or not pairs:
            continue
        different = [
            next(at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other)
            for pair in pairs
            if pair[0] != pair[1]
        ]
        found.setdefault(model, {}).setdefault(workload, {})[engine] = {
            "requests": len(pairs),
            "equal": len(pairs) - len(different),
            "first_differences": sorted(different),
        }
    return found


# ---- shown


def markdown(summary: dict[str, Any]) -> str:
    parts = [f"{summary['device']}, {summary['date']}, commit {summary['commit']}"]
    for model in summary["all"]:
        parts += [f"### {model}", _engine_table(model, summary)]
    if summary["rows"]:
        header = ["model", "ours", "workload", "tok/s", "of limit", "best peer", "tok/s", "of limit"]
        header += ["ratio", "spread", "ttft ratio"]
        ttft = {(row["model"], row["engine"], row["workload"]): row["ratio"] for row in summary["ttft"]}
        cells = []
        for row in summary["rows"]:
            place = (row["model"], row["engine"], row["workload"])
            paired = " to ".join(f"{ratio:g}" for ratio in row["spread"])
            limit = summary["limits"].get(row["model"], {}).get(row["dtype"], {}).get(row["workload"])
            ours, theirs = ([speed, _share(speed, limit)] for speed in (row["ours"], row["best_peer"]))
            cells.append([*place, *ours, row["peer"], *theirs, row["ratio"], paired, ttft[place]])
        parts += ["### Ours against the best peer (ratio above 1: ours is ahead)", _table(header, cells)]
    if summary["busy"]:
        header = ["model", "workload", "engine", "quiet tok/s", "busy tok/s", "share", ""]
        cells = [
            [model, workload, engine, figures["quiet"], figures["busy"], figures["share"], figures["failed"] or ""]
            for model, workloads in summary["busy"].items()
            for workload, engines in workloads.items()
            for engine, figures in engines.items()
        ]
        parts += ["### Beside a busy process", _table(header, cells)]
    if summary["equality"]:
        header = ["model", "workload", "engine", "requests", "same tokens", "first difference, median"]
        cells = [
            [model, workload, engine, found["requests"], found["equal"], _middle(found["first_differences"])]
            for model, workloads in summary["equality"].items()
            for workload, engines in workloads.items()
            for engine, found in engines.items()
        ]
        parts += [f"### Tokens beside those of {REFERENCE}", _table(header, cells)]
    return "\n\n".join(parts)


def _engine_table(model: str, summary: dict[str, Any]) -> str:
    """`*n` marks a cell with only n clean repeats."""
    workloads = summary["all"][model]
    header = ["engine", *(f"{name} {unit}" for name in workloads for unit in ("tok/s", "ttft ms")), "MiB", "start s"]
    lines = []
    for engine in sorted({engine for engines in workloads.values() for engine in engines}):
        line: list[Any] = [engine]
        for workload, engines in workloads.items():
            cell = engines.get(engine)
            mark = f" *{cell['clean']}" if cell and cell["clean"] < summary["repeats"] else ""
            line += [f"{cell[speed_metric(workload)]:g}{mark}", f"{cell['ttft_s'] * 1e3:.4g}"] if cell else [None, None]
        line += [summary[section].get(model, {}).get(engine) for section in ("memory", "startup")]
        lines.append(line)
    return _table(header, lines)


def progress(name: str, result: dict[str, Any]) -> str:
    """One line about a pass that has ended."""
    parts = [f"{name}: {result['seconds']:.0f} s"]
    for workload, runs in result.get("runs", {}).items():
        speeds = [f"{run[speed_metric(workload)]:.4g}" for run in runs]
        parts.append(f"{workload} {' '.join(speeds)}")
    parts += [f"{workload} FAILED: {error}" for workload, error in result.get("errors", {}).items()]
    parts += [f"FAILED: {result['failed']}"] if "failed" in result else []
    return ", ".join(parts)


def commit() -> str:
    """The checkout's commit, with + if files have changed since; "unknown" outside a checkout."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}"


def _table(header: list[str], lines: list[list[Any]]) -> str:
    rows = [header, ["---"] * len(header), *([_shown(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:g}"
    return "-" if cell is None else str(cell)


def _share(speed: float, limit: float | None) -> str | None:
    return f"{speed / limit:.0%}" if limit else None


def _round(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def _middle(values: list[int]) -> float | None:
    return statistics.median(values) if values else None


def _nested(flat: dict[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (model, engine), value in flat.items():
        found.setdefault(model, {})[engine] = value
    return found
