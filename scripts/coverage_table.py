"""Write a Markdown table of the branch coverage that `coverage run` has measured, one line for each folder.

python scripts/coverage_table.py benchmarks/results/coverage.md    (make coverage)
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def measured() -> dict[str, Any]:
    """Read the report of `coverage json` on the last run."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", file.name]
        subprocess.run(command, cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(Path(file.name).read_bytes())
    return found


def by_folder(files: dict[str, Any]) -> dict[str, Counter[str]]:
    """The sums of each folder, and of all of them under `total`."""
    sums: dict[str, Counter[str]] = {}
    for name, file in files.items():
        numbers = Counter({key: file["summary"][key] for key in COUNTED})
        for folder in (str(Path(name).parent), "total"):
            sums.setdefault(folder, Counter()).update(numbers)
    return dict(sorted(sums.items(), key=lambda item: (item[0] == "total", item[0])))


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def table(sums: dict[str, Counter[str]]) -> str:
    rows = [
        f"| {folder} | {share(sum_['covered_lines'], sum_['num_statements'])} of {sum_['num_statements']:,} "
        f"| {share(sum_['covered_branches'], sum_['num_branches'])} of {sum_['num_branches']:,} |"
        for folder, sum_ in sums.items()
    ]
    return "\n".join(["| folder | lines | branches |", "| --- | --- | --- |", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the Markdown file to write")
    out = parser.parse_args().out
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=9"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    out.write_text(
        f"# Branch coverage\n\n`make coverage` on {datetime.now(tz=UTC).date()}, commit {commit.stdout.strip()}, "
        f"Python {platform.python_version()}: what `tests/unit` and `tests/cpu`\ntake in their own process. "
        "Child processes and what needs a GPU count as not covered ([docs/testing.md](../../docs/testing.md)).\n\n"
        f"{table(by_folder(measured()['files']))}\n"
    )


if __name__ == "__main__":
    main()
