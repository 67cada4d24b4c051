"""NVIDIA's tools for parts of `gpu_check`: the sanitizer for failed cases, the profiler for kernels that must be fast.

Both are external programs that may be missing, refuse the machine or hang. Their output is condensed to a few lines.
"""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_check_parts import python_path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).resolve().parent
SANITIZER, PROFILER = "compute-sanitizer", "ncu"
CHECKS = ("memcheck", "racecheck")
SOUND = ("decode_attention_cases", "prefill_attention_cases", "sampler_cases")
"""Files of cases for the sanitizer if no case failed: the kernels in which a fault would matter most."""
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
METRICS = {
    "Duration": "us",
    "Memory Throughput": "memory",
    "DRAM Throughput": "dram %",
    "Compute (SM) Throughput": "sm %",
    "L2 Hit Rate": "l2 hit %",
    "Achieved Occupancy": "occupancy %",
    "Registers Per Thread": "registers",
    "Warp Cycles Per Issued Instruction": "cycles an instruction",
    "Max Bandwidth": "max bandwidth %",
}
KERNELS = "decode_attention|prefill_attention|pick"
"""Names of the kernels to profile, as a regular expression."""
LAST_LINES = 4


def installed(tool: str) -> bool:
    return shutil.which(tool) is not None


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit status (None: it was stopped, or could not be started) and all that the command printed."""
    environment = os.environ | {"PYTHONPATH": python_path(ROOT, FOLDER)}
    try:
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
                return None, out
            return process.returncode, out
    except OSError as error:
        return None, str(error)


def sanitize(name: str, cases: Sequence[int], seconds: float, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the findings of both checks on these cases of a file; an event each, as parts emit them."""
    script = [sys.executable, str(FOLDER / "gpu_check_cases.py"), name, *options]
    script += ["--only", ",".join(map(str, cases))]
    for check in CHECKS:
        command = [SANITIZER, "--tool", check, "--error-exitcode", "9", "--print-limit", "5", *script]
        status, out = run(command, seconds / len(CHECKS))
        said = [line.lstrip("= ").rstrip() for line in out.splitlines() if line.startswith("=========")]
        said = [line for line in said if line and not line.startswith("COMPUTE-SANITIZER")]
        what = f"{check} of {name} {list(cases)}"
        if status is None:
            yield {"fact": {what: f"stopped after {seconds / len(CHECKS):.0f} s; {' | '.join(said[:LAST_LINES])}"}}
        elif status == 9 or any("ERROR SUMMARY" in line and " 0 errors" not in line for line in said):
            yield {"failed": f"{what}: {' | '.join(said[: 3 * LAST_LINES])}"}
        elif any("0 errors" in line or "0 hazards" in line for line in said):
            yield {"fact": {what: "clean"}}
        else:
            tail = said[-LAST_LINES:] or out.splitlines()[-LAST_LINES:]
            yield {"fact": {what: f"status {status}: {' | '.join(tail)}"}}


def profile(seconds: float, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each launch of gpu_check_once.py, with the profiler's metrics."""
    command = [PROFILER, "--csv", "--clock-control", "none", "-k", f"regex:{KERNELS}"]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, str(FOLDER / "gpu_check_once.py"), *options]
    status, out = run(command, seconds)
    launches = metrics_of(out)
    for number, (kernel, values) in enumerate(launches):
        yield {"row": {"kernel": f"ncu: {kernel}", "shape": f"launch {number}", "us": values.get("us", 0.0), **values}}
    if status != 0 or not launches:
        tail = " | ".join(out.splitlines()[-LAST_LINES:])
        yield {"failed": f"{PROFILER}: status {status}, {len(launches)} launches seen: {tail}"}


def metrics_of(text: str) -> list[tuple[str, dict[str, float]]]:
    """(kernel, METRICS) of each launch in the CSV that the profiler's output contains."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(lines[start:]):
        name = METRICS.get(str(row.get("Metric Name")))
        if name is None:
            continue
        _, values = found.setdefault(row["ID"], (str(row["Kernel Name"]).partition("<")[0].partition("(")[0], {}))
        try:
            value = float(str(row["Metric Value"]).replace(",", ""))
        except ValueError:
            continue
        if row.get("Metric Unit") in ("ns", "nsecond"):
            value /= 1000
        values.setdefault(name, value)
    return list(found.values())
