"""`python benchmarks kernels`: compares the native CPU kernels with the machine's limits and with torch.

`rows` has the kernels with a limit. For most it is memory: they have their speed `gb_s`, `limit`, which is the speed at
which the same number of threads reads memory, and `share`, the ratio of both. For chunks of prompts it is arithmetic:
`tflop_s`, and as `limit` the speed at which the threads multiply in registers. `against_torch` has all other kernels,
which are compared only with the same work in plain torch, or in torch's gloo.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from micro import (
    kernels_attention,
    kernels_experts,
    kernels_fused,
    kernels_linear,
    kernels_masks,
    kernels_ranks,
)
from micro.kernels_timing import Row
from vllm_lite.kernels import cpu

PARTS = ("attention", "linear", "experts", "fused", "masks", "ranks")


def run(
    parts: Sequence[str],
    threads: Sequence[int],
    report: Callable[[str], None] = lambda _line: None,
    products: kernels_linear.LinearSelection = kernels_linear.ALL,
    cases: Sequence[kernels_attention.AttentionSelection] = (),
) -> dict[str, Any]:
    """Measure `parts`, some of PARTS, with each number of threads: for linear layers the `products`, for attention the
    `cases` in the types of `products`, or without `cases` those that kernels_attention chooses. `report` is called with
    a line that names the next measurement. Raises ValueError for an instruction set that the machine does not have."""
    if not cpu.available():
        raise RuntimeError("there are no native CPU kernels to measure")
    rows: list[Row] = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        cpu.set_num_threads(num_threads)
        for part in parts:
            report(f"measuring {part}, threads: {num_threads} ...")
            rows += [{"threads": num_threads} | _rounded(row) for row in _measure(part, num_threads, products, cases)]
    return {
        "device": _cpu_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "command": " ".join(["python", "benchmarks", *sys.argv[1:]]),
        "rows": [row for row in rows if "share" in row],
        "against_torch": [row for row in rows if "share" not in row],
    }


def _measure(
    part: str,
    num_threads: int,
    products: kernels_linear.LinearSelection,
    cases: Sequence[kernels_attention.AttentionSelection],
) -> Iterator[Row]:
    if part == "attention":
        yield from kernels_attention.measure(num_threads, cases, products.dtypes)
    elif part == "linear":
        yield from kernels_linear.measure(num_threads, products)
    elif part == "experts":
        yield from kernels_experts.measure(num_threads)
    elif part == "fused":
        yield from kernels_fused.measure()
    elif part == "masks":
        yield from kernels_masks.measure()
    else:
        yield from kernels_ranks.measure(num_threads)


def table(figures: dict[str, Any]) -> str:
    lines = [f"{figures['device']}, {figures['date']}, commit {figures['commit']}"]
    for row in [*figures["rows"], *figures["against_torch"]]:
        values = "  ".join(
            f"{name} {value}" for name, value in row.items() if name not in ("kernel", "shape", "threads")
        )
        lines.append(f"{row['threads']} threads  {row['kernel']:<38} {row['shape']:<34} {values}")
    return "\n".join(lines)


def _rounded(row: Row) -> Row:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown CPU'}, {len(names)} hardware threads"


def _commit() -> str:
    """The commit of the checkout that contains this file, with a + if files have changed since; "" outside of a
    checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
