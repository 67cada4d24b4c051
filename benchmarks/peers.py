#!/usr/bin/env python3
"""Compares vllm_lite with other engines on a CPU: same models, same token ids, greedy, measured in turn.

python benchmarks/peers.py --peers DIR [--startup] [--busy 1], where runners/setup.sh made DIR. See README.md.
"""

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import limits
import peers_report as report
from runners import machine

HERE = Path(__file__).resolve().parent
SAMPLE_S = 0.5
"""Seconds between two samples of memory, each of which takes some milliseconds."""
ALONE = "W1"
SPARE_REPEATS = 1
"""Maximum repeats that a round adds if other processes disturbed the first ones."""
BUSY_TOKENS = {"small": {"W1": 128, "W2": 32}, "medium": {"W1": 32}}
"""Workloads that are also run on a busy machine, with the tokens that a request generates: some engines are 70 times
slower there."""
BUSY_REPEATS = 3
BUSY_LIMIT_S = 180
BUSY_QUIET_WAIT_S = 5
NOT_STARTED = 127
"""The exit status that a shell gives a command that it cannot start."""
STARTUP_ROUNDS = 4
"""Start-ups per engine. The first one warms the page cache and is not counted."""


@dataclass(frozen=True)
class EngineCommand:
    """Command that starts an engine's runner; its common arguments are appended."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    file: str = ""
    """Suffix of a file that the engine needs: it runs only models for which setup.sh made such a file."""


@dataclass(frozen=True)
class Pass:
    """Measurement of one call of a runner. The result is in DIR/runs under `name`."""

    name: str
    model: str
    engine: str
    only: list[str]
    reps: list[int]
    need: int
    workload: str = "all"
    busy: int = 0
    quiet_wait_s: int = 0
    limit_s: int = 900
    memory: bool = False


def installed_engines(peers: Path) -> dict[str, EngineCommand]:
    """Installed engines by name. A name ends with the type in which the engine competes, one of report.DTYPES."""

    def runner(module: str, dtype: str, python: str, *, file: str = "", **env: str) -> EngineCommand:
        return EngineCommand([python, "-m", f"runners.{module}", "--dtype", dtype], env, file)

    def python(venv: str) -> str:
        return str(peers / "venvs" / venv / "bin" / "python")

    allocator = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    preload = ":".join(map(str, [*allocator, *(peers / "venvs/vllm/lib").glob("libiomp5.so")]))
    return {
        "ours-bf16": runner("ours", "bf16", sys.executable),
        "ours-int8": runner("ours", "int8", sys.executable),
        "ours-int4": runner("ours", "int4", sys.executable),
        "ours_g32-int4": runner("ours", "int4_g32", sys.executable),
        "ours_gguf-int4": runner("ours", "q4_0", sys.executable),
        "ours_file-int4": runner("ours", "q4_1", sys.executable, file="-q4_1.gguf"),
        "vllm-bf16": runner("vllm", "bf16", python("vllm"), LD_PRELOAD=preload),
        "llama-bf16": runner("llama_cpp", "bf16", python("llamacpp")),
        "llama-int8": runner("llama_cpp", "q8_0", python("llamacpp")),
        "llama-int4": runner("llama_cpp", "q4_0", python("llamacpp")),
        "llama_k-int4": runner("llama_cpp", "q4_k_m", python("llamacpp")),
        "llama_file-int4": runner("llama_cpp", "q4_1", python("llamacpp"), file="-q4_1.gguf"),
        "ov-bf16": runner("openvino", "bf16", python("ov")),
        "ov-int8": runner("openvino", "int8", python("ov")),
        "ov-int4": runner("openvino", "int4", python("ov")),
        "ct2-int8": runner("ctranslate2", "int8", python("ct2")),
        "hf-bf16": runner("transformers", "bf16", python("hf")),
    }


class Bench:
    """Runs passes in order and keeps their results."""

    def __init__(self, peers: Path, engines: dict[str, EngineCommand], *, threads: int, fresh: set[str]) -> None:
        self.peers = peers
        self.threads = threads
        self._engines = engines
        self._fresh = fresh
        self._commit = report.commit()
        (peers / "runs").mkdir(parents=True, exist_ok=True)

    def measure(self, wanted: Pass) -> dict[str, Any]:
        """The result of a pass; a known one if it was measured before with the same settings. `failed`: the reason of a
        failure."""
        path = self.peers / "runs" / f"{wanted.name}.json"
        settings = self._settings(wanted)
        known = read_json(path)
        if wanted.engine not in self._fresh and covers(known, settings):
            return known
        path.unlink(missing_ok=True)
        begin_s = time.monotonic()
        log = path.with_suffix(".log")
        code, memory_bytes = self._run(wanted, settings | {"out": path}, log)
        result = read_json(path)
        for run in [run for runs in result.get("runs", {}).values() for run in runs]:
            run["since_start_s"] = run["first_at_s"] - begin_s
        seconds = time.monotonic() - begin_s
        result |= {"settings": settings, "commit": self._commit, "memory_bytes": memory_bytes, "seconds": seconds}
        if code is None:
            result |= {"done": True, "failed": f"not done after {wanted.limit_s} s"}  # a repetition would fail as well
        elif code:
            result |= {"done": False, "failed": f"exit status {code}, see {log}"}
        path.write_text(json.dumps(result))
        print(f"{time.strftime('%H:%M:%S')} {report.progress(wanted.name, result)}", flush=True)
        return result

    def _settings(self, wanted: Pass) -> dict[str, Any]:
        """The runner's arguments by name."""
        return {
            "model": str(self.peers / "models" / wanted.model),
            "workload": str(self.peers / "workloads" / f"{wanted.workload}.json"),
            "threads": self.threads,
            "need": wanted.need,
            "reps": ",".join(map(str, wanted.reps)),
            "only": ",".join(wanted.only),
            "busy": wanted.busy,
            "quiet-wait": wanted.quiet_wait_s,
        }

    def _run(self, wanted: Pass, arguments: dict[str, Any], log: Path) -> tuple[int | None, int]:
        """Run a pass. Returns what wait() returns."""
        engine = self._engines[wanted.engine]
        command = [*engine.command, *(f"--{name}={value}" for name, value in arguments.items())]
        env, null = {**os.environ, **engine.env}, subprocess.DEVNULL
        with log.open("w") as output:
            try:
                child = subprocess.Popen(command, cwd=HERE, env=env, stdin=null, stdout=output, stderr=output)
            except OSError as error:
                output.write(f"{error}\n")
                return NOT_STARTED, 0
            try:
                return wait(child, wanted.limit_s, memory=wanted.memory)
            finally:
                kill(child)


def wait(child: "subprocess.Popen[Any]", limit_s: float, *, memory: bool) -> tuple[int | None, int]:
    """Wait for a runner. Returns its exit status, None if it still runs at the limit, and its peak memory in bytes, 0
    if not asked for."""
    peak = machine.PeakMemory(child.pid)
    end_s = time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(min(SAMPLE_S, left_s)), peak.bytes
        if memory:
            peak.sample()
    return None, peak.bytes


def kill(child: "subprocess.Popen[Any]") -> None:
    """Kill a running runner and its child processes."""
    if child.poll() is None:
        for pid in machine.tree(child.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, {} if there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def covers(known: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a result is complete for these settings; it may have more workloads."""
    had = known.get("settings", {})
    same = had | {"only": ""} == settings | {"only": ""}
    return bool(known.get("done")) and same and set(settings["only"].split(",")) <= set(had["only"].split(","))


# ---- the passes


def engines_of(args: argparse.Namespace, model: str) -> list[str]:
    """Names of the engines that can run the model."""
    files = {name: args.commands[name].file for name in args.engines}
    return [name for name, file in files.items() if not file or (args.peers / "models" / f"{model}{file}").exists()]


def quiet_passes(args: argparse.Namespace, model: str, num_reps: int) -> Iterator[Pass]:
    """Passes in rounds, with all engines in turn; every repeat has its own token ids.

    A single stream depends on the speed of memory, which changes by the minute on a shared host. So its passes come
    first, separately, and engines are compared within a minute or two.
    """
    alone = [name for name in args.workloads if name == ALONE]
    for suffix, only in ((f".{ALONE}", alone), ("", [name for name in args.workloads if name != ALONE])):
        begin = 0
        for index in range(args.rounds if only else 0):
            need = args.repeats // args.rounds + (index < args.repeats % args.rounds)
            reps = [(begin + i) % num_reps for i in range(min(need + SPARE_REPEATS, num_reps))]
            begin += need
            for engine in [name for name in engines_of(args, model) if index == 0 or name not in args.once]:
                name, wait_s = f"{model}.{engine}{suffix}.r{index}", args.quiet_wait
                yield Pass(name, model, engine, only, reps, need, quiet_wait_s=wait_s, memory=True)


def startup_passes(args: argparse.Namespace, model: str) -> Iterator[Pass]:
    for index in range(STARTUP_ROUNDS):
        for engine in engines_of(args, model):
            name = f"{model}.{engine}.startup{index}"
            yield Pass(name, model, engine, ["start"], [0], 1, workload="startup")


def busy_passes(args: argparse.Namespace, model: str, num_reps: int) -> Iterator[Pass]:
    """Passes whose repeats are quiet and busy in turn."""
    reps = [turn % num_reps for turn in range(2 * BUSY_REPEATS)]
    for engine in [name for name in engines_of(args, model) if name not in args.once]:
        name = f"{model}.{engine}.busy"
        only = [workload for workload in BUSY_TOKENS.get(model, {}) if workload in args.workloads]
        if only:
            need, wait_s = len(reps) + 1, min(args.quiet_wait, BUSY_QUIET_WAIT_S)  # all of them, clean or not
            yield Pass(name, model, engine, only, reps, need, f"busy-{model}", args.busy, wait_s, BUSY_LIMIT_S)


def add_limits(figures: report.Figures, args: argparse.Namespace) -> None:
    """Add the machine's limit to every cell for which it is known."""
    if (speeds := limits.Machine.measured(args.threads)) is None:
        return
    dtypes = {report.dtype_of(engine) for engine in args.engines if report.is_ours(engine)}
    for model in args.models:
        for dtype, name in itertools.product(sorted(dtypes), args.workloads):
            requests, alone = args.known_workloads[name]["reps"][0], name in report.ONE_STREAM
            tokens_s = limits.limit(speeds, args.peers / "models" / model, dtype, requests, alone=alone)
            if tokens_s is not None:
                figures.add_limit(model, dtype, name, tokens_s)


def write_derived_workloads(folder: Path, workloads: dict[str, Any]) -> None:
    """Write the workloads of start-up and busy passes."""

    def shorter(workload: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        return workload | {
            "reps": [[request | {"n": num_tokens} for request in requests] for requests in workload["reps"]]
        }

    start = {"warmup": [], "reps": [[{"id": 0, "prompt": [3, 4, 5], "n": 1}]]}
    derived = {"startup": {"start": start}} | {
        f"busy-{model}": {name: shorter(workloads[name], count) for name, count in tokens.items() if name in workloads}
        for model, tokens in BUSY_TOKENS.items()
    }
    for name, content in derived.items():
        (folder / f"{name}.json").write_text(json.dumps({"workloads": content}))


def main() -> int:
    args = arguments()
    write_derived_workloads(args.peers / "workloads", args.known_workloads)
    num_reps = min(len(workload["reps"]) for workload in args.known_workloads.values())
    bench = Bench(args.peers, args.commands, threads=args.threads, fresh=set(args.fresh))
    figures = report.Figures(args.repeats)
    for model in args.models:
        for wanted in quiet_passes(args, model, num_reps):
            figures.add_quiet(model, wanted.engine, wanted.only, bench.measure(wanted))
        for wanted in startup_passes(args, model) if args.startup else ():
            result = bench.measure(wanted)
            if not wanted.name.endswith("startup0"):
                figures.add_startup(model, wanted.engine, result)
        for wanted in busy_passes(args, model, num_reps) if args.busy else ():
            figures.add_busy(model, wanted.engine, wanted.only, bench.measure(wanted))
    add_limits(figures, args)
    summary = {"device": report.device(), "date": time.strftime("%Y-%m-%d", time.gmtime()), **figures.summary()}
    print(f"\n{report.markdown(summary)}")
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--peers", type=Path, required=True, help="the folder that runners/setup.sh made")
    parser.add_argument("--models", type=_names, default=["small", "medium"])
    parser.add_argument("--engines", type=_names, help="default: all that are installed")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=COMMAND", help="one more, or in place")
    parser.add_argument("--workloads", type=_names, default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--repeats", type=int, default=3, help="clean repeats of each cell (default: 3)")
    parser.add_argument("--rounds", type=int, help="in how many turns; an engine starts once a turn (default: repeats)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quiet-wait", type=int, default=20, metavar="S", help="seconds to wait till others are quiet")
    parser.add_argument("--startup", action="store_true", help="measure the time from command to first token, too")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="measure beside N busy processes, too")
    parser.add_argument(
        "--once", type=_names, default=[], help="engines for the first turn only, and never beside busy ones"
    )
    parser.add_argument("--fresh", type=_names, default=[], help="engines to measure again although results are there")
    parser.add_argument("--out", type=Path, help="write the figures as JSON, too")
    args = parser.parse_args()
    args.peers = args.peers.absolute()
    args.rounds = min(args.rounds or args.repeats, args.repeats)
    if args.repeats < 1 or args.rounds < 1 or args.threads < 1 or args.busy < 0:
        parser.error("--repeats, --rounds and --threads must be at least 1, --busy at least 0")
    args.commands = installed_engines(args.peers)
    for text in args.engine:
        name, _, command = text.partition("=")
        if name.rpartition("-")[2] not in report.DTYPES or not command:
            parser.error(f"--engine must be NAME-TYPE=COMMAND with TYPE of {', '.join(report.DTYPES)}, got {text!r}")
        args.commands[name] = EngineCommand(shlex.split(command))
    args.engines = args.engines or [name for name, engine in args.commands.items() if Path(engine.command[0]).exists()]
    unknown = [name for name in args.engines + args.once + args.fresh if name not in args.commands]
    if unknown:
        parser.error(f"unknown engine {unknown[0]}; known are {', '.join(args.commands)}")
    missing = [
        path
        for path in [*(f"models/{m}" for m in args.models), "workloads/all.json"]
        if not (args.peers / path).exists()
    ]
    if missing:
        parser.error(f"{args.peers / missing[0]} does not exist; runners/setup.sh makes it")
    args.known_workloads = read_json(args.peers / "workloads" / "all.json")["workloads"]
    unknown = [name for name in args.workloads if name not in args.known_workloads]
    if unknown:
        parser.error(f"unknown workload {unknown[0]}; known are {', '.join(args.known_workloads)}")
    return args


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runner is ended, too
    sys.exit(main())
