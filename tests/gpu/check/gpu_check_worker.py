"""Runs the tests of a file in as many processes as needed: after a test that fails, a new process continues.

After an illegal access the device fails every call until the process ends, so all later tests in the process would
fail.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
WORKER_TESTS = "tests/gpu/test_worker_on_device.py"
MAX_PROCESSES = 6
SAID = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
Command = Callable[[list[str], float], dict[str, Any]]
"""Runs a command for at most the given seconds; see Check._command."""


@dataclass
class Tests:
    """The results of one file of tests."""

    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def seen(self) -> list[str]:
        return [*self.passed, *self.skipped]


def run_tests(file: str, run: Command, seconds: float, root: Path = ROOT) -> Tests:
    """Run every test of a file with pytest, without the project's configuration, whose plugins may be missing here."""
    found, failed = Tests(), list[str]()
    for _ in range(MAX_PROCESSES):
        command = [sys.executable, "-m", "pytest", "-vx", "--tb=short", "-c", os.devnull, "--rootdir", str(root)]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider", file]
        command += [part for test in (*found.seen, *failed) for part in ("--deselect", test)]
        done = run(command, seconds)
        seen = SAID.findall(done["out"])
        found.passed += [test for test, word in seen if word == "PASSED"]
        found.skipped += [test for test, word in seen if word == "SKIPPED"]
        broken = [test for test, word in seen if word in ("FAILED", "ERROR")]
        if done["status"] in (0, 5):
            return found
        lines = [line for line in done["out"].splitlines() if line.startswith("E  ")]
        why = " | ".join(line[1:].strip() for line in lines[:3]) or " | ".join(done["tail"][-2:])
        if not broken:  # it has ended the process, or there is no time left
            found.problems.append(f"{file}: {why}")
            return found
        failed += broken
        found.problems.append(f"{broken[0].partition('::')[2]}: {why}")
    return found
