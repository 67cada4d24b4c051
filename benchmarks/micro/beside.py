"""`python benchmarks beside TREE -- COMMAND`: a command of this program in another checkout and in this one, in turn.

Machines change their speed within minutes, so figures of two versions are comparable only as ratios of neighbouring
runs. Each checkout runs the command with its own `.venv`, its own native library and, in every round, a new process.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_lite.errors import ConfigError

HERE = Path(__file__).resolve().parents[2]
NAMES = ("threads", "kernel", "shape", "process", "name")
"""Fields that distinguish the entries of a list, where they have them."""


def run(
    other: Path, words: Sequence[str], rounds: int, report: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """Run `python benchmarks WORDS --json` in `other` and here, `rounds` times in turn, the first of a round by turns.
    `ratios` has for each figure that all runs have: the median of this checkout's divided by the other's of the same
    round, the smallest and the largest of them, and both medians. Raises ConfigError if a run fails."""
    trees = {"other": other.resolve(), "here": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(rounds):
        for name in sorted(trees, reverse=number % 2 == 0):
            report(f"round {number + 1} of {rounds}: {trees[name]}")
            found[name].append(dict(figures_in(_measured(trees[name], words))))
    common = [key for key in found["here"][0] if all(key in each for runs in found.values() for each in runs)]
    pairs = {key: [(old[key], new[key]) for old, new in zip(*found.values(), strict=True)] for key in common}
    ratios = {key: compared(values) for key, values in pairs.items() if all(old for old, _new in values)}
    return {"command": list(words), "other": str(other), "rounds": rounds, "ratios": ratios}


def table(figures: Mapping[str, Any]) -> str:
    head = f"{'here / other':<88}{'ratio':>8}{'smallest':>10}{'largest':>9}{'other':>12}{'here':>12}"
    return "\n".join(
        [head]
        + [
            f"{name:<88}{row['ratio']:>8.3f}{row['smallest']:>10.3f}{row['largest']:>9.3f}"
            f"{row['other']:>12.4g}{row['here']:>12.4g}"
            for name, row in figures["ratios"].items()
        ]
    )


def figures_in(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, and the names on the way to it. Entries of lists are named by their NAMES; those
    without are left out, because nothing says that both versions list them in one order."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from figures_in(part, f"{path} {name}".strip()) if name not in NAMES else ()
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and (names := [str(part[name]) for name in NAMES if name in part]):
                yield from figures_in(part, " ".join([path, *names]))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def compared(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The median, smallest and largest ratio of pairs (other, here), and the medians of both."""
    ratios = [new / old for old, new in pairs]
    old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
    return {
        "ratio": statistics.median(ratios),
        "smallest": min(ratios),
        "largest": max(ratios),
        "other": old,
        "here": new,
    }


def _measured(tree: Path, words: Sequence[str]) -> Any:
    python = tree / ".venv/bin/python"
    command = [str(python if python.exists() else sys.executable), "benchmarks", *words, "--json"]
    try:
        ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
        return json.loads(ended.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"`{' '.join(command[1:])}` failed in {tree}: {last}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{' '.join(command[1:])}` gave no figures in {tree}: {error}") from error
