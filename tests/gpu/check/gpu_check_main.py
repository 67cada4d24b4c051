"""`scripts/gpu_check`: all checks and measurements that need a GPU, in ten minutes, from a bare checkout.

It needs numpy, torch and cupy. The other packages of an engine, compiled kernels and the native library are taken from
the folder .carry of the checkout, which gpu_check_carry.py fills on a machine with a network. Without that folder,
wheels may be in .whl or wheels, and the rest is compiled here. Stages, in this order (gpu_check_stages.py):

{stages}

`--call first`, second or third runs stages that fit into ten minutes. If the smoke stage fails, no later stage runs. A
stage that exceeds its time is stopped and reports where it was; its findings so far are kept, since each row and
problem is written to gpu_check.jsonl at once. Later runs append to this file. A file has the table of all figures. The
script prints the problems, the rules of gpu_check_rules.py that apply (what to change because of the findings), the
most important rows, and the time of each stage. `--emulate` runs stages with the emulator on the CPU, to test this
script; its figures mean nothing.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_check_rules as rules
from gpu_check_stages import CALLS, EMULATED, STAGES, Check

LIMIT_S = 560.0
MOST_CHARACTERS = 11_000
"""Maximum characters of the last output: a reader of a remote run may get only the end of it."""
MOST_ROWS = 20
KEYS = (
    r"^copy:",
    r"^decode_attention: batch (1 ctx 32768|64 ctx 8192) gqa 4",
    r"^step, (graphs|ahead|mixed): ",
    r"^throughput",
    r"^linear, (int4 g128|fp8): (1|64|512) rows, 28672",
    r"^experts: (1|64|2048) rows",
    r"^prefill_attention, paged: 1 x 4096 new of 4096",
    r"^sampler pick: 1 x",
    r"^engine: ",
)
"""Rows that are printed, as regular expressions of "kernel: shape"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages. Returns 0 if all of them succeeded, 1 if something failed, 2 if nothing can be checked here."""
    arguments = parse(argv)
    check = Check(arguments)
    try:
        device = check.describe()
    except ImportError as error:
        print(f"gpu_check: {error}; it needs numpy, torch and, on a GPU, cupy", file=sys.stderr)
        return 2
    if device is None:
        print("gpu_check: torch sees no CUDA device; --emulate tries the script without one", file=sys.stderr)
        return 2
    try:
        check.run(arguments.parts)
    finally:
        report(check)
        check.close()
    return int(check.failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    stages = "\n".join(f"{name:<11} {stage.what} [{stage.seconds:g} s]" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description=(__doc__ or "").replace("{stages}", stages),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for the JSON files [$OUT, or here]")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"time for everything, in seconds [{LIMIT_S:g}]")
    parser.add_argument("--parts", default="", help="only these stages, separated by commas")
    parser.add_argument("--call", choices=sorted(CALLS), help="the stages of one of three calls of ten minutes")
    parser.add_argument("--cases", default="", help="only case files whose name contains this")
    parser.add_argument("--max-cases", type=int, default=0, help="only so many cases of each file")
    parser.add_argument("--wheels", help="folder with wheels of what this Python lacks")
    parser.add_argument("--vllm", help="the Python of a vLLM installation")
    parser.add_argument("--emulate", action="store_true", help="run kernels on the CPU, to test this script")
    arguments = parser.parse_args(argv)
    every = CALLS[arguments.call] if arguments.call else tuple(STAGES)
    if arguments.emulate:
        every = tuple(name for name in every if name in EMULATED)
    arguments.parts = [part for part in arguments.parts.split(",") if part] or list(every)
    if strangers := set(arguments.parts) - set(STAGES):
        parser.error(f"unknown parts {', '.join(sorted(strangers))}; there are {', '.join(STAGES)}")
    return arguments


def report(check: Check) -> None:
    """Write the files, and print the most important findings."""
    advice = rules.said(check.rows)
    check.found["rules"] = [text for text in advice if text.startswith("->")]
    folder = Path(check.arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    device = "".join(c if c.isalnum() else "-" for c in str(check.found["device"])).strip("-").lower()
    header = {name: check.found[name] for name in ("device", "date", "commit")}
    kernels, everything = folder / f"{device}-kernels.json", folder / f"{device}-check.json"
    if check.rows:
        kernels.write_text(json.dumps(header | {"rows": check.rows}, indent=1) + "\n")
        (folder / f"{device}-table.txt").write_text(table(check.rows) + "\n\n" + "\n".join(advice) + "\n")
    for part in check.found.values():
        if isinstance(part, dict):
            part.pop("out", None)
    everything.write_text(json.dumps(check.found | {"problems": check.problems}, indent=1) + "\n")
    print("\n" + summary(check))
    print(f"wrote {everything}" + (f", {kernels} and {device}-table.txt beside them" if check.rows else ""))


def summary(check: Check) -> str:
    """All important findings in less than MOST_CHARACTERS, for a reader who sees only the end of a long output."""
    lines = [f"{len(check.problems)} problems" if check.problems else "no problems"]
    shortest = max(80, 5000 // max(1, len(check.problems)))
    lines += [f"FAILED {problem[:shortest]}" for problem in check.problems]
    for name, result in check.found.get("cases", {}).items():
        skipped = f"  skipped: {result['skipped']}" if "skipped" in result else ""
        lines.append(f"{name:<28} {result['passed']:>4} passed {len(result['failed']):>4} failed{skipped}")
    lines += check.found["rules"]
    if rows := key_rows(check.rows):
        lines.append(table(rows))
    compiled = check.found.get("compiled", {})
    for name, seconds in check.found.get("seconds", {}).items():
        lines.append(f"{name:<12} {seconds:>7.1f} s" + (f", {compiled[name]} compiled" if name in compiled else ""))
    text = "\n".join(lines)
    return text if len(text) < MOST_CHARACTERS else text[: MOST_CHARACTERS - 40] + "\n... the files have the rest"


def key_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The most important rows, at most MOST_ROWS."""
    found = [row for row in rows if any(re.search(key, f"{row['kernel']}: {row['shape']}") for key in KEYS)]
    return (found or rows)[:MOST_ROWS]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':<28} {'shape':<46} {'us':>10} {'GB/s':>8} {'TFLOP/s':>8} {'limit':>8} {'share':>6}"]
    for row in rows:
        cells = [f"{row[key]:.1f}" if key in row else "" for key in ("gb_s", "tflop_s")]
        if row.get("tokens_s") is not None:
            cells[1] = f"{row['tokens_s']:.0f}/s"
        limit, share = row.get("limit", row.get("device_us")), row.get("share")
        lines.append(
            f"{row['kernel']:<28} {row['shape']:<46} {row.get('us', 0):>10.1f} {cells[0]:>8} {cells[1]:>8} "
            f"{'' if limit is None else f'{limit:.1f}':>8} {'' if share is None else f'{share:.0%}':>6}"
        )
    return "\n".join(lines)
