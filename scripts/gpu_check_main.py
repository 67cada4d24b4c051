"""`scripts/gpu_check`: what needs a GPU to be checked or measured, in limited time, as one table and two JSON files.

1. what machine this is
2. every case of tests/kernels/*_cases.py on the device, each file in a process of its own: a kernel that writes where
   it must not takes its CUDA context with it, so the process is started again behind the case that did
3. decode attention, RoPE with cache write, experts, linear layers on quantized weights: captured in a CUDA graph,
   replayed, compared bit for bit
4. ranks that share a model: world 1 over NCCL, world 2 over gloo on one device (scripts/gpu_check_parallel.py)
5. a worker and an engine that are killed: streams go on with the same tokens (scripts/gpu_check_recovery.py)
6. measurements of the kernels (scripts/gpu_check_bench.py)
7. tests/gpu with pytest, and tokens per second of a random Llama with graphs and without, where the packages are there

A part that exceeds its time is stopped, says where it was, and what it had found is kept: each row and problem is a
line of gpu_check.jsonl as soon as it is there, to which later runs add; scripts/gpu_check_rules.md says what to change
by them. `--emulate` runs parts 2 to 6 with the emulator on the CPU, to test this script; its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_check_parts import Part, python_path, run_cases, run_part

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 480.0
CASES_S, GRAPHS_S, PARALLEL_S, RECOVERY_S = 200.0, 60.0, 90.0, 120.0
BENCH_S, TESTS_S, THROUGHPUT_S = 150.0, 120.0, 120.0
"""The most that each part may take; it is less when the time left is less."""
END_TO_END_MODEL = "random-500m"
CASES_AS_TESTS = "tests/gpu/test_kernels_on_device.py"
"""The file whose cases part 2 has run already."""
NEEDED = ("msgspec", "zmq", "tokenizers", "safetensors", "tqdm")
"""Modules that serving needs beside torch and numpy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if everything that ran was right, 1 if something failed, 2 if nothing can be checked here."""
    arguments = _parse(argv)
    check = Check(arguments)
    try:
        device = check.describe()
    except ImportError as error:
        print(f"gpu_check: {error}; it needs numpy, torch and, on a GPU, cupy", file=sys.stderr)
        return 2
    if device is None:
        print("gpu_check: torch sees no CUDA device; --emulate tries the script without one", file=sys.stderr)
        return 2
    for name in arguments.parts:
        getattr(check, name)()
    check.report()
    return int(check.failed)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ["cases", "graphs", "parallel", "recovery", "bench", "tests", "throughput"]
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for the JSON files [$OUT, or here]")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"time for everything, in seconds [{LIMIT_S:g}]")
    parser.add_argument("--parts", default="", help=f"only these, separated by commas: {', '.join(names)}")
    parser.add_argument("--cases", default="", help="only case files whose name contains this")
    parser.add_argument("--max-cases", type=int, default=0, help="only so many cases of each file")
    parser.add_argument("--emulate", action="store_true", help="run kernels on the CPU, to test this script")
    arguments = parser.parse_args(argv)
    arguments.parts = [part for part in arguments.parts.split(",") if part] or names[: 5 if arguments.emulate else 7]
    if strangers := set(arguments.parts) - set(names):
        parser.error(f"unknown parts {', '.join(sorted(strangers))}; there are {', '.join(names)}")
    return arguments


class Check:
    """The findings so far, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline_s = time.monotonic() + arguments.limit_s
        self.mode = ["--emulate"] if arguments.emulate else []
        self.found: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    def seconds(self, most: float) -> float:
        return float(min(most, self.deadline_s - time.monotonic()))

    # ---- the parts

    def describe(self) -> str | None:
        """Print the machine. Returns the device's name, None if there is none. Raises ImportError."""
        import numpy as np
        import torch

        self.found |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit()}
        self.found["versions"] = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        if self.arguments.emulate:
            self.found["device"] = "emulator"
        elif torch.cuda.is_available():
            self.found["device"] = torch.cuda.get_device_name()
            properties = torch.cuda.get_device_properties(0)
            self.found["memory_gib"] = round(properties.total_memory / 2**30, 1)
            self.found["sm"] = f"{properties.major}.{properties.minor} x {properties.multi_processor_count}"
            self.found["versions"] |= {"cuda": torch.version.cuda, "cupy": _version("cupy")}
            if find_spec("cupy") is None:
                self.problem("cupy is not installed: no kernel can run; pip install cupy-cuda12x or cupy-cuda13x")
        else:
            return None
        print(json.dumps(self.found, indent=1), flush=True)
        return str(self.found["device"])

    def cases(self) -> None:
        """Part 2, several files at a time: compiling takes longer than running."""
        names = sorted(path.stem for path in (ROOT / "tests" / "kernels").glob("*_cases.py"))
        names = [name for name in names if self.arguments.cases in name]
        deadline_s = time.monotonic() + self.seconds(CASES_S)
        at_once = 1 if self.arguments.emulate else max(1, min(6, (os.cpu_count() or 2) // 2))
        options = [*self.mode, *(["--max-cases", str(self.arguments.max_cases)] if self.arguments.max_cases else [])]
        with ThreadPoolExecutor(at_once) as pool:
            results = list(pool.map(lambda name: run_cases(name, options, deadline_s), names))
        self.found["cases"] = {result.name: {"passed": result.passed, "failed": result.failures} for result in results}
        for result in results:
            if result.skipped:
                self.found["cases"][result.name]["skipped"] = result.skipped
            for case, message in result.failures.items():
                self.problem(f"{result.name}: {case}: {message}")
            for message in result.problems:
                self.problem(f"{result.name}: {message}")

    def graphs(self) -> None:
        self._events("graphs", "gpu_check_graphs.py", GRAPHS_S)

    def parallel(self) -> None:
        if lacking := self._lacking():
            self.skip("parallel", f"ranks need {lacking}")
            return
        self._events("parallel", "gpu_check_parallel.py", PARALLEL_S)

    def recovery(self) -> None:
        if lacking := self._lacking():
            self.skip("recovery", f"an engine needs {lacking}")
            return
        self._events("recovery", "gpu_check_recovery.py", RECOVERY_S)

    def bench(self) -> None:
        self._events("bench", "gpu_check_bench.py", BENCH_S)

    def tests(self) -> None:
        if find_spec("pytest") is None:
            self.skip("tests", "tests/gpu needs pytest, which is not installed")
            return
        # Without the project's configuration, which asks for plug-ins that may not be here.
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider", "tests/gpu", f"--ignore={CASES_AS_TESTS}"]
        if lacking := self._lacking("transformers"):
            self.skip("tests", f"tests/gpu needs {lacking}")
            return
        done = self._command(command, TESTS_S)
        self.found["tests"] = done
        if done["status"] not in (0, 5):
            self.problem(f"tests/gpu: {done['tail'][-1] if done['tail'] else done['status']}")

    def throughput(self) -> None:
        """Tokens a second of a random Llama through all processes."""
        if lacking := self._lacking():
            self.skip("throughput", f"end to end needs {lacking}")
            return
        for name in ("graphs", "eager"):
            environment = {"VLLM_LITE_ENFORCE_EAGER": str(name == "eager").lower(), "VLLM_LITE_DEVICE": "cuda"}
            command = [sys.executable, "-m", "vllm_lite", "bench", "throughput", "--model", END_TO_END_MODEL, "--json"]
            command += ["--num-prompts", "128", "--input-len", "128", "--output-len", "128"]
            done = self._command(command, THROUGHPUT_S / 2, environment)
            figures = _last_json(done["out"])
            self.found.setdefault("throughput", {})[name] = figures or done["tail"]
            if figures is None:
                self.problem(f"throughput ({name}): {' '.join(done['tail'][-2:])}")
            else:
                print(f"throughput, {name}: {json.dumps(figures)}", flush=True)

    def _lacking(self, *more: str) -> str:
        lacking = [name for name in (*NEEDED, *more) if find_spec(name) is None]
        return ", ".join({"zmq": "pyzmq"}.get(name, name) for name in lacking)

    # ---- how they run

    def _events(self, name: str, script: str, most_s: float) -> None:
        seconds = self.seconds(most_s)
        if seconds <= 1:
            self.skip(name, "no time left")
            return
        part = Part(name, [str(ROOT / "scripts" / script), *self.mode])
        for event in run_part(part, time.monotonic() + seconds):
            if "row" in event:
                self.rows.append(event["row"])
                self.note(part=name, **event["row"])
            elif "failed" in event:
                self.problem(f"{name}: {event['failed']}")
            elif "fact" in event:
                self.found.setdefault(name, {}).update(event["fact"])
        for problem in part.problems:
            self.problem(f"{name}: {problem}")

    def _command(self, command: list[str], most_s: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
        seconds = self.seconds(most_s)
        if seconds <= 1:
            return {"status": None, "out": "", "tail": ["no time left"]}
        print(f"$ {' '.join(command[1:])}", flush=True)
        with tempfile.TemporaryFile("w+") as out:
            try:
                status: int | None = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": python_path(ROOT)} | (environment or {}),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
            out.seek(0)
            text = out.read()
        tail = text.splitlines()[-15:] + ([f"stopped after {seconds:.0f} s"] if status is None else [])
        if status != 0:
            print("\n".join(tail), flush=True)
        return {"status": status, "out": text, "tail": tail}

    def note(self, **found: Any) -> None:
        """Add a line to what all runs have found."""
        folder = Path(self.arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        header = {name: self.found.get(name) for name in ("date", "commit", "device")}
        with (folder / "gpu_check.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(header | found) + "\n")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.note(problem=text)
        print(f"FAILED {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        self.found[name] = {"skipped": why}
        print(f"skipped {name}: {why}", flush=True)

    # ---- the result

    def report(self) -> None:
        print(f"\n{table(self.rows)}\n")
        for name, result in self.found.get("cases", {}).items():
            skipped = f"  skipped: {result['skipped']}" if "skipped" in result else ""
            print(f"{name:<28} {result['passed']:>4} passed {len(result['failed']):>4} failed{skipped}")
        print(f"{len(self.problems)} problems" if self.problems else "no problems")
        folder = Path(self.arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        device = "".join(c if c.isalnum() else "-" for c in str(self.found["device"])).strip("-").lower()
        header = {name: self.found[name] for name in ("device", "date", "commit")}
        kernels, everything = folder / f"{device}-kernels.json", folder / f"{device}-check.json"
        if self.rows:
            kernels.write_text(json.dumps(header | {"rows": self.rows}, indent=1) + "\n")
            print(f"wrote {kernels}")
        for part in self.found.values():
            if isinstance(part, dict):
                part.pop("out", None)
        everything.write_text(json.dumps(self.found | {"problems": self.problems}, indent=1) + "\n")
        print(f"wrote {everything}")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':<28} {'shape':<46} {'us':>10} {'GB/s':>8} {'TFLOP/s':>8} {'limit':>8} {'share':>6}"]
    for row in rows:
        cells = [f"{row[key]:.1f}" if key in row else "" for key in ("gb_s", "tflop_s")]
        limit, share = row.get("limit"), row.get("share")
        lines.append(
            f"{row['kernel']:<28} {row['shape']:<46} {row.get('us', 0):>10.1f} {cells[0]:>8} {cells[1]:>8} "
            f"{'' if limit is None else f'{limit:.1f}':>8} {'' if share is None else f'{share:.0%}':>6}"
        )
    return "\n".join(lines)


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError as error:
        return f"none ({error})"


def _last_json(text: str) -> dict[str, Any] | None:
    """The last JSON object that stands on lines of its own."""
    start = text.rfind("\n{") + 1 if "\n{" in text else text.find("{")
    try:
        value = json.loads(text[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
