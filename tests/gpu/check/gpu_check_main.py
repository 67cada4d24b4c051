"""`scripts/gpu_check`: what needs a GPU to be checked or measured, in ten minutes, from a bare checkout.

It needs numpy, torch and cupy; what an engine needs beside them may lie as wheels in a folder .whl or wheels in the
checkout, or wheels beside it, and the native library is built if it is not there. Stages, in the order of what they
tell (gpu_check_stages.py):

{stages}

A stage that exceeds its time is stopped, says where it was, and what it had found is kept: each row and problem is a
line of gpu_check.jsonl as soon as it is there, to which later runs add. At the end stand the rules of
gpu_check_rules.py: what to change by what was found. `--emulate` runs stages with the emulator on the CPU, to test
this script; its figures mean nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_check_rules as rules
from gpu_check_stages import EMULATED, STAGES, Check

LIMIT_S = 560.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if everything that ran was right, 1 if something failed, 2 if nothing can be checked here."""
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
    parser.add_argument("--cases", default="", help="only case files whose name contains this")
    parser.add_argument("--max-cases", type=int, default=0, help="only so many cases of each file")
    parser.add_argument("--wheels", help="folder with wheels of what this Python lacks")
    parser.add_argument("--vllm", help="the Python of a vLLM installation")
    parser.add_argument("--emulate", action="store_true", help="run kernels on the CPU, to test this script")
    arguments = parser.parse_args(argv)
    every = EMULATED if arguments.emulate else tuple(STAGES)
    arguments.parts = [part for part in arguments.parts.split(",") if part] or list(every)
    if strangers := set(arguments.parts) - set(STAGES):
        parser.error(f"unknown parts {', '.join(sorted(strangers))}; there are {', '.join(STAGES)}")
    return arguments


def report(check: Check) -> None:
    """Print the tables and the rules, and write the files."""
    print(f"\n{table(check.rows)}\n")
    for name, result in check.found.get("cases", {}).items():
        skipped = f"  skipped: {result['skipped']}" if "skipped" in result else ""
        print(f"{name:<28} {result['passed']:>4} passed {len(result['failed']):>4} failed{skipped}")
    advice = rules.said(check.rows)
    print("\n" + "\n".join(advice) + "\n")
    check.found["rules"] = [text for text in advice if text.startswith("->")]
    print(f"{len(check.problems)} problems" if check.problems else "no problems")
    folder = Path(check.arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    device = "".join(c if c.isalnum() else "-" for c in str(check.found["device"])).strip("-").lower()
    header = {name: check.found[name] for name in ("device", "date", "commit")}
    kernels, everything = folder / f"{device}-kernels.json", folder / f"{device}-check.json"
    if check.rows:
        kernels.write_text(json.dumps(header | {"rows": check.rows}, indent=1) + "\n")
        print(f"wrote {kernels}")
    for part in check.found.values():
        if isinstance(part, dict):
            part.pop("out", None)
    everything.write_text(json.dumps(check.found | {"problems": check.problems}, indent=1) + "\n")
    print(f"wrote {everything}")


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
