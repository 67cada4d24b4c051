"""Parts of `gpu_check` as processes that report their findings as lines of JSON, each watched and ended in time."""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).resolve().parent
QUIET_S = 90.0
"""A process without output for this many seconds hangs: no case and no compilation takes a third of that."""
PATIENCE = {"VLLM_LITE_HEARTBEAT_TIMEOUT_S": "120"}
"""Settings of engines during checks: so long a timeout that compiling a kernel is not taken for a device that hangs."""
MAX_RESTARTS = 8
LAST_LINES = 3

Event = dict[str, Any]


def emit(**event: Any) -> None:
    """Called in a part: send an event to the parent."""
    print(json.dumps(event), flush=True)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Called in a part: a parser of the flags that `run_restarted` gives it, to which the part may add its own."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--emulate", action="store_true")
    return parser


def run_checks(checks: Mapping[str, Callable[[], str | None]], first: int, usable: Callable[[], bool]) -> None:
    """Called in a part: run the checks from number `first` on. Each returns or raises its problem. If a check leaves
    the device unusable the process ends, and `run_restarted` continues in another process."""
    for number, (name, check) in enumerate(checks.items()):
        if number < first:
            continue
        emit(begin=number, case=name)
        start_s = time.monotonic()
        try:
            problem = check() or ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:1000]
        still = usable()
        problem = problem or ("" if still else "the device reports an error behind it")
        seconds = time.monotonic() - start_s
        emit(fact={name: problem or "equal"}, say=f"{name}: {problem or 'equal'}, {seconds:.1f} s", usable=still)
        if problem:
            emit(failed=f"{name}: {problem}", case=name, usable=still)
        if not still:
            return
    emit(finished=True)


@dataclass
class Part:
    """One process to run: a script with its arguments. `problems` lists failures of the process itself."""

    name: str
    command: list[str]
    quiet_s: float = QUIET_S
    problems: list[str] = field(default_factory=list)
    finished: bool = False
    """Whether it ended normally, as its last event says."""


def python_path(*folders: Path) -> str:
    """PYTHONPATH with `folders` before its present entries: packages may be installed in a separate folder."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_part(part: Part, deadline_s: float) -> Iterator[Event]:
    """Run it, yield its events as they arrive, and print other lines. Ends the process at the deadline, or if it is
    quiet for too long."""
    environment = os.environ | PATIENCE | {"PYTHONPATH": python_path(ROOT, FOLDER), "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            yield from _events(part, process, deadline_s)
        finally:
            _end(process)
        if part.finished:
            return
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
        if part.problems:  # it was stopped, and says where it was
            heads = [i for i, line in enumerate(lines) if "(most recent call first)" in line]
            where = heads[-1] if heads else len(lines)  # the main thread is the last one
            part.problems[-1] = " | ".join([part.problems[-1], *lines[where + 1 :][:LAST_LINES]])
        else:
            last = " | ".join(lines[-LAST_LINES:])
            part.problems.append(f"the process ended with status {process.returncode}: {last or 'it said nothing'}")


def _events(part: Part, process: "subprocess.Popen[str]", deadline_s: float) -> Iterator[Event]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            line = lines.get(timeout=max(min(left_s, part.quiet_s), 0.01))
        except queue.Empty:
            part.problems.append("out of time" if left_s <= part.quiet_s else f"nothing heard for {part.quiet_s:.0f} s")
            return
        if line is None:
            return
        if not line.startswith("{"):
            print(line, end="", flush=True)
            continue
        event = json.loads(line)
        part.finished = part.finished or "finished" in event
        if "say" in event:
            print(f"{part.name}: {event['say']}", flush=True)
        yield event


def _end(process: "subprocess.Popen[str]") -> None:
    """End the process with all that it started, if it has not ended."""
    for patience_s, ending in ((0.5, signal.SIGABRT), (5, signal.SIGKILL)):  # at the first, Python tells where it is
        try:
            process.wait(patience_s)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, ending)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@dataclass
class CaseResults:
    """The results of one file of cases."""

    name: str
    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Name of each failure -> its position in the file of cases."""
    problems: list[str] = field(default_factory=list)
    skipped: str = ""


def run_restarted(part: Part, deadline_s: float) -> Iterator[Event]:
    """The events of a part with numbered checks. After a check that ended its process, or made the device unusable, a
    new process continues with `--first`."""
    command, first = part.command, 0
    for _ in range(MAX_RESTARTS):
        once = Part(part.name, [*command, "--first", str(first)], part.quiet_s)
        running: tuple[int, str] | None = None
        for event in run_part(once, deadline_s):
            if "begin" in event:
                running = (event["begin"], event["case"])
            yield event
        if once.finished:
            part.finished = True
            return
        if running is None or time.monotonic() >= deadline_s:
            part.problems += once.problems
            return
        first = running[0] + 1
        why = once.problems[0] if once.problems else "it ended the process"
        yield {"ended": why, "case": running[1]}
    part.problems.append(f"given up after {MAX_RESTARTS} processes that ended early")


def run_cases(name: str, options: list[str], deadline_s: float) -> CaseResults:
    """Every case of tests/kernels/<name>.py."""
    results = CaseResults(name)
    part = Part(name, [str(FOLDER / "gpu_check_cases.py"), name, *options])
    number = 0
    for event in run_restarted(part, deadline_s):
        if "begin" in event:
            number = event["begin"]
        elif "skipped" in event:
            results.skipped = event["skipped"]
        elif "passed" in event:
            results.passed += 1
        elif "failed" in event:
            results.failures[event["case"]] = event["failed"]
            results.numbers[event["case"]] = number
            print(f"{name}: {event['case']} FAILED: {event['failed'][:300]}", flush=True)
        elif "ended" in event:
            results.failures.setdefault(event["case"], event["ended"])
            results.numbers.setdefault(event["case"], number)
    results.problems += part.problems
    return results
